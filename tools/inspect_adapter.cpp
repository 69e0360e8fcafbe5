// SPDX-License-Identifier: AGPL-3.0-only
//
// What does this PEFT adapter hold, can it be served on this model, and does it compute what PEFT computes?
// Exit status: 0 when the whole adapter can be served and every compared delta agrees, 1 when not, 2 for a
// wrong command line or a model configuration that cannot be read.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/model/families.hpp"
#include "atlas/lora/overlay/build.hpp"
#include "atlas/peft.hpp"
#include "inspect_compare.hpp"

namespace {

using namespace atlas::lora;
using namespace inspect_adapter;

/// All that is found out about one adapter.
struct Report {
  std::string directory;
  std::string model;
  std::optional<Adapter> adapter{};  // none when it is refused
  std::vector<std::string> refusals{};
  std::vector<Comparison> comparisons{};
  std::vector<std::string> tables{};      // of the base model, that token rows were built against
  std::optional<TokenOverlay> overlay{};  // the rows, where they could be built

  [[nodiscard]] bool held() const {
    return refusals.empty() && std::all_of(comparisons.begin(), comparisons.end(),
                                           [](Comparison const& comparison) { return comparison.held(); });
  }
};

std::vector<std::string> lines_of(std::string const& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// The base model's table of this name in a file, `[vocab, hidden]`; none when the file has no such tensor.
std::optional<HostTensor> find_table(SafetensorsFile const& file, std::string_view name,
                                     ModelShape const& shape) {
  for (TensorInfo const& tensor : file.tensors()) {
    std::string const path = "." + tensor.name;
    bool const named = path.find("." + std::string(name) + ".") != std::string::npos;
    if (!named || !path.ends_with(".weight")) continue;
    if (tensor.shape != std::vector<std::int64_t>{shape.vocab(), shape.hidden()}) continue;
    auto table = file.read(tensor.name);
    if (table) return std::move(*table);
  }
  return std::nullopt;
}

/// Builds an adapter's token rows against a base model's tables, in the type that the embedding has there.
template <Element T>
Result<Adapter> build_against(Adapter const& adapter, ModelShape const& shape,
                              std::optional<HostTensor> const& embedding,
                              std::optional<HostTensor> const& head) {
  std::vector<T> rounded[2];
  std::optional<HostServedTable<T>> served[2];
  int i = 0;
  for (auto const* const table : {&embedding, &head}) {
    if (*table) {
      rounded[i].resize((*table)->bytes.size() / element_bytes((*table)->type));
      auto const counts = convert<T>(**table, std::span<T>(rounded[i]));
      if (!counts) return cuda::std::unexpected<Error>(counts.error());
      served[i].emplace(rounded[i].data(), shape.hidden());
    }
    ++i;
  }
  ServedTables<HostServedTable<T>> const tables{served[0] ? &*served[0] : nullptr,
                                                served[1] ? &*served[1] : nullptr};
  return build_overlay(adapter, shape, tables);
}

/// Builds the token rows as a server would; `base_path` is a file with the base model's tables, or empty.
void build_rows(Report& report, Adapter const& adapter, ModelShape const& shape,
                std::string const& base_path) {
  if (adapter.raw_overlay.empty()) return;
  std::optional<HostTensor> embedding, head;
  if (!base_path.empty()) {
    auto const file = SafetensorsFile::open(base_path);
    if (!file) {
      report.refusals.push_back(file.error().message);
      return;
    }
    embedding = find_table(*file, "embed_tokens", shape);
    head = shape.tied_head() ? std::nullopt : find_table(*file, "lm_head", shape);
    for (auto const* const table : {&embedding, &head}) {
      if (*table) report.tables.push_back((*table)->name);
    }
  }
  ElementType const type = embedding ? embedding->type : head ? head->type : ElementType::f32;
  auto const built = type == ElementType::f32 ? build_against<float>(adapter, shape, embedding, head)
                     : type == ElementType::f16
                         ? build_against<__half>(adapter, shape, embedding, head)
                         : build_against<__nv_bfloat16>(adapter, shape, embedding, head);
  if (!built) {
    report.refusals.push_back(built.error().message);
  } else {
    report.overlay = built->overlay;
  }
}

Report inspect(std::string const& directory, std::string const& model, ModelShape const& shape,
               LoadOptions const& options, std::string const& expected_path, std::string const& base_path) {
  Report report{directory, model};
  auto adapter = load_adapter(directory, shape, options);
  if (!adapter) {
    report.refusals = lines_of(adapter.error().message);
    return report;
  }
  build_rows(report, *adapter, shape, base_path);
  if (!expected_path.empty()) {
    auto const expected = SafetensorsFile::open(expected_path);
    if (expected) {
      report.comparisons = compare_all(*adapter, *expected);
      if (report.comparisons.empty())
        report.refusals.push_back(expected_path +
                                  ": no MODULE|x or MODULE|PARAMETER|delta_weight to compare with");
    } else {
      report.refusals.push_back(expected.error().message);
    }
  }
  report.adapter = std::move(*adapter);
  return report;
}

std::string hex(Digest digest) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(digest.high),
                static_cast<unsigned long long>(digest.low));
  return text;
}

std::string layer_name(Site site, ModelShape const& shape) {
  std::string const& name = shape.module(site).name;
  return site.layer == model_wide ? name : "layer " + std::to_string(site.layer) + " " + name;
}

/// "3 rows (F32): 3, 7, 319", at most eight of them by name.
std::string rows_text(OverrideRows const& own) {
  if (own.empty()) return "none";
  std::string text = std::to_string(own.ids.size()) + (own.ids.size() == 1 ? " row (" : " rows (") +
                     to_string(own.rows.type) + "):";
  for (std::size_t i = 0; i < own.ids.size() && i < 8; ++i) {
    text += (i == 0 ? " " : ", ") + std::to_string(own.ids[i]);
  }
  return own.ids.size() > 8 ? text + ", ..." : text;
}

void print_rows(Report const& report) {
  if (!report.overlay) return;
  std::string against;
  for (std::string const& table : report.tables) against += (against.empty() ? "" : " and ") + table;
  std::printf("  token rows, %s\n", against.empty()
                                        ? "without the base model's tables to compare with"
                                        : ("compared with " + detail::printable(against)).c_str());
  std::printf("    embedding: %s\n", rows_text(report.overlay->embedding).c_str());
  std::printf("    head: %s\n", report.overlay->head_is_embedding ? "is the embedding, and takes its rows"
                                                                  : rows_text(report.overlay->head).c_str());
}

char const* linear_name(ExpertLinear linear) {
  constexpr char const* names[] = {"gate", "up", "down"};
  return names[static_cast<int>(linear)];
}

void print_text(Report const& report, ModelShape const& shape) {
  std::printf("%s on %s\n", report.directory.c_str(), report.model.c_str());
  if (report.adapter) {
    Adapter const& adapter = *report.adapter;
    std::printf("  %lld modules applied of %lld present, largest rank %d, digest %s\n",
                static_cast<long long>(adapter.modules_applied),
                static_cast<long long>(adapter.modules_present), adapter.max_rank,
                hex(adapter.digest).c_str());
    for (AdapterPair const& pair : adapter.pairs) {
      std::printf("    %-40s rank %-4d scale %-12.9g %s%s\n", layer_name(pair.site, shape).c_str(), pair.rank,
                  static_cast<double>(pair.scale), to_string(pair.a.type), pair.bias ? " with bias" : "");
    }
    for (RouterPair const& pair : adapter.routers) {
      std::string const place = "layer " + std::to_string(pair.layer) + " router";
      std::printf("    %-40s rank %-4d scale %-12.9g %s\n", place.c_str(), pair.rank,
                  static_cast<double>(pair.scale), to_string(pair.a.type));
    }
    for (ExpertPair const& pair : adapter.experts) {
      std::string const place = "layer " + std::to_string(pair.layer) + " expert " +
                                std::to_string(pair.expert) + " " + linear_name(pair.linear);
      std::printf("    %-40s rank %-4d scale %-12.9g %s\n", place.c_str(), pair.rank,
                  static_cast<double>(pair.scale), to_string(pair.a.type));
    }
    for (std::string const& warning : adapter.warnings) std::printf("  warning: %s\n", warning.c_str());
  }
  print_rows(report);
  for (std::string const& refusal : report.refusals) std::printf("  refused: %s\n", refusal.c_str());
  for (Comparison const& c : report.comparisons) {
    std::string const module = detail::printable(c.module);
    if (c.fault.empty()) {
      std::printf("  %s: differs from PEFT by %.2e of its largest |delta| %.4g: %s\n", module.c_str(),
                  c.error, c.largest, c.held() ? "agrees" : "DISAGREES");
    } else {
      std::printf("  %s: not compared: %s\n", module.c_str(), c.fault.c_str());
    }
  }
  std::printf("%s\n", report.held() ? "can be served" : "cannot be served as it is");
}

void print_json(Report const& report, ModelShape const& shape) {
  nlohmann::ordered_json out{
      {"directory", report.directory}, {"model", report.model}, {"held", report.held()}};
  if (report.adapter) {
    Adapter const& adapter = *report.adapter;
    out["modules_applied"] = adapter.modules_applied;
    out["modules_present"] = adapter.modules_present;
    out["max_rank"] = adapter.max_rank;
    out["digest"] = hex(adapter.digest);
    out["pairs"] = nlohmann::ordered_json::array();
    for (AdapterPair const& pair : adapter.pairs) {
      out["pairs"].push_back({{"layer", pair.site.layer},
                              {"module", shape.module(pair.site).name},
                              {"rank", pair.rank},
                              {"scale", pair.scale},
                              {"dtype", to_string(pair.a.type)},
                              {"bias", pair.bias.has_value()}});
    }
    out["routers"] = nlohmann::ordered_json::array();
    for (RouterPair const& pair : adapter.routers) {
      out["routers"].push_back({{"layer", pair.layer},
                                {"rank", pair.rank},
                                {"scale", pair.scale},
                                {"dtype", to_string(pair.a.type)}});
    }
    out["experts"] = nlohmann::ordered_json::array();
    for (ExpertPair const& pair : adapter.experts) {
      out["experts"].push_back({{"layer", pair.layer},
                                {"expert", pair.expert},
                                {"linear", linear_name(pair.linear)},
                                {"rank", pair.rank},
                                {"scale", pair.scale},
                                {"dtype", to_string(pair.a.type)}});
    }
    out["warnings"] = adapter.warnings;
  }
  if (report.overlay) {
    out["token_rows"] = {{"tables", report.tables},
                         {"embedding", report.overlay->embedding.ids},
                         {"head", report.overlay->head.ids},
                         {"head_is_embedding", report.overlay->head_is_embedding}};
  }
  out["refusals"] = report.refusals;
  out["comparisons"] = nlohmann::ordered_json::array();
  for (Comparison const& c : report.comparisons) {
    nlohmann::ordered_json row{{"module", c.module}, {"held", c.held()}};
    if (c.fault.empty()) {
      row.update({{"error", c.error}, {"largest", c.largest}});
    } else {
      row["fault"] = c.fault;
    }
    out["comparisons"].push_back(std::move(row));
  }
  // Names come from files, which may hold anything.
  std::cout << out.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  std::string directory, model, expected, base;
  LoadOptions options;
  bool json = false;
  CLI::App app{"Says what a PEFT adapter holds and whether it can be served on a model."};
  app.add_option("DIR", directory, "folder with adapter_config.json and adapter_model.safetensors")
      ->required();
  app.add_option("--model", model, "the base model's config.json (default: the one in DIR)");
  app.add_option("--expected", expected,
                 "safetensors file with MODULE|x and PEFT's MODULE|delta, or with PEFT's "
                 "MODULE|PARAMETER|delta_weight, to compare ours with");
  app.add_option(
      "--base", base,
      "safetensors file with the base model's embed_tokens and lm_head, to compare token rows with");
  std::map<std::string, FusedExpertAxes> const axes{{"by-shape", FusedExpertAxes::by_shape},
                                                    {"current", FusedExpertAxes::current},
                                                    {"older", FusedExpertAxes::older}};
  app.add_option("--expert-axes", options.fused_expert_axes, "which way round fused experts were written")
      ->transform(CLI::CheckedTransformer(axes));
  app.add_flag("--json", json, "print one JSON object");
  try {
    app.parse(argc, argv);
  } catch (CLI::ParseError const& error) {
    int const status = app.exit(error);
    return status == 0 ? 0 : 2;
  }
  if (model.empty()) model = directory + "/config.json";
  auto const config = read_model_config(model);
  auto const shape =
      config ? model_shape(*config) : Result<ModelShape>(cuda::std::unexpected<Error>(config.error()));
  if (!shape) {
    std::fprintf(stderr, "%s\n", shape.error().message.c_str());
    return 2;
  }
  Report const report = inspect(directory, model, *shape, options, expected, base);
  json ? print_json(report, *shape) : print_text(report, *shape);
  return report.held() ? 0 : 1;
}
