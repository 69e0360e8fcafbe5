// SPDX-License-Identifier: AGPL-3.0-only
//
// Do adapters that come, go and are replaced change anybody's output? Eight rows decode, each with an adapter
// of its own for a while, as other threads load, promote, replace and unload adapters at random. Every row's
// output of every step is compared, bit for bit, with that of the same adapter alone in a quiet pool.
// Computes on the CPU; not tuned for speed.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <atlas/lora.hpp>

namespace {

using namespace atlas::lora;
using Pool = AdapterPool<float, HostBackend>;

constexpr std::array<char const*, 6> names{"ada", "bea", "cleo", "dora", "eve", "fay"};
constexpr std::size_t versions = 3;  // contents of each name
constexpr std::size_t rows = 8;
constexpr std::uint64_t least_steps = 2000;
constexpr std::uint64_t least_adapted = 1000;  // outputs with an adapter, before it may end
constexpr std::int32_t stream = 0;

template <class R>
auto expect(R result) {
  if (!result) {
    std::cerr << to_string(result.error().code) << ": " << result.error().message << '\n';
    std::exit(1);
  }
  if constexpr (!std::is_same_v<R, Result<void>>) return *std::move(result);
}

ModelShape make_shape() {
  ModelDescription model;
  model.num_layers = 2;
  model.modules = {{"self_attn.q_proj", 48, 64, {0, 1}, {}}, {"mlp.up_proj", 96, 64, {0, 1}, {}}};
  return expect(ModelShape::create(model));
}

std::vector<float> random_values(std::uint32_t seed, std::size_t count) {
  std::minstd_rand random(seed + 1);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random() % 2001) / 1000.0F - 1.0F;
  return values;
}

HostTensor random_tensor(std::uint32_t seed, std::int64_t height, std::int64_t width) {
  std::vector<float> const values = random_values(seed, static_cast<std::size_t>(height * width));
  HostTensor tensor;
  tensor.name = "random";
  tensor.shape = {height, width};
  tensor.bytes.resize(values.size() * sizeof(float));
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

/// What a file would hold: rank 3 to 8, and a site left out by every other adapter.
Adapter make_adapter(ModelShape const& shape, std::size_t name, std::size_t version) {
  Adapter adapter;
  auto const content = static_cast<std::uint32_t>(name * versions + version);
  auto const rank = static_cast<std::int32_t>(3 + content % 6);
  for (std::size_t i = content % 2; i < shape.sites().size(); ++i) {
    Site const site = shape.sites()[i];
    Module const& linear = shape.module(site);
    auto const seed = static_cast<std::uint32_t>(content * 100 + i * 2);
    adapter.pairs.push_back({site, rank, 0.5F, random_tensor(seed, rank, linear.k_in),
                             random_tensor(seed + 1, linear.n_out, rank), std::nullopt});
  }
  adapter.max_rank = rank;
  adapter.modules_present = adapter.modules_applied = static_cast<std::int64_t>(adapter.pairs.size());
  adapter.digest = Digest{name, version + 1};
  return adapter;
}

/// The deltas of all sites for all rows, behind one another: what a decode step adds.
class Decoder {
 public:
  /// Tables are taken once, before anything is loaded, as a captured graph takes them.
  explicit Decoder(Pool const& pool) {
    for (Site const site : pool.shape().sites()) tables_.push_back(expect(pool.route(site)));
    x_ = random_values(12345, rows * static_cast<std::size_t>(tables_[0].k_in));
    scratch_.resize(static_cast<std::size_t>(tables_[0].max_rank));
  }

  /// `[rows]` outputs, each of all sites.
  std::array<std::vector<float>, rows> step(std::array<std::int32_t, rows> const& slots) {
    std::array<std::vector<float>, rows> outputs;
    for (RouteTable<float> const& table : tables_) {
      std::vector<float> y(rows * static_cast<std::size_t>(table.n_out), 1.0F);  // the base model's
      reference_delta<float, float>(table, slots, x_.data(), table.k_in, y.data(), table.n_out, scratch_);
      for (std::size_t row = 0; row < rows; ++row) {
        auto const first = y.begin() + static_cast<std::ptrdiff_t>(row) * table.n_out;
        outputs[row].insert(outputs[row].end(), first, first + table.n_out);
      }
    }
    return outputs;
  }

 private:
  std::vector<RouteTable<float>> tables_;
  std::vector<float> x_;
  std::vector<float> scratch_;
};

using Outputs = std::array<std::vector<float>, rows>;

bool same_bits(std::vector<float> const& a, std::vector<float> const& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Each content alone in a pool of one slot; `[names][versions]`, and base.
struct QuietRun {
  std::array<std::array<Outputs, versions>, names.size()> adapted;
  Outputs base;

  explicit QuietRun(ModelShape const& shape) {
    Pool pool = expect(Pool::create(shape, {.max_slots = 1, .max_rank = 8}));
    Decoder decoder(pool);
    std::array<std::int32_t, rows> slots{};
    for (std::size_t name = 0; name < names.size(); ++name) {
      for (std::size_t version = 0; version < versions; ++version) {
        expect(pool.load(names[name], make_adapter(shape, name, version)));
        expect(pool.begin_step(stream));
        adapted[name][version] = decoder.step(slots);
        expect(pool.end_step(stream));
      }
    }
    slots.fill(base_slot);
    base = decoder.step(slots);
  }
};

/// The files' stand-in: the newest version of each name.
struct Reader {
  ModelShape const* shape;
  std::array<std::atomic<std::size_t>, names.size()>* newest;

  Result<Adapter> operator()(std::string_view name, std::stop_token const&) const noexcept {
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (name == names[i]) return make_adapter(*shape, i, (*newest)[i]);
    }
    return fail(Errc::not_found, std::string(name));
  }
};

struct Server {
  ModelShape shape = make_shape();
  Pool pool = expect(Pool::create(shape, {.max_slots = 4, .spare = 2, .max_rank = 8}));
  std::array<std::atomic<std::size_t>, names.size()> newest{};
  HostTier<float, Reader> tier{shape,
                               expect(PinnedArena::create(pool.backend(), std::size_t{48} << 10, 4096)),
                               Reader{&shape, &newest}};
  std::atomic<bool> stop = false;
  std::atomic<int> refused_for_no_reason = 0;
  std::mutex mutex;
  std::map<std::uint64_t, std::size_t> loaded;  // version by id, as loads were told

  void check(Errc outcome) {
    if (!retryable(outcome) && outcome != Errc::ok && outcome != Errc::not_found) ++refused_for_no_reason;
  }

  // Brings adapters from the host tier into the pool.
  void promote_at_random(std::uint32_t seed) {
    std::minstd_rand random(seed);
    while (!stop) {
      std::size_t const name = random() % names.size();
      auto const content = tier.get(names[name]);
      check(content ? Errc::ok : content.error().code);
      if (!content) continue;
      auto const staged = pool.load(names[name], **content);
      check(staged ? Errc::ok : staged.error().code);
      if (!staged) continue;
      std::lock_guard<std::mutex> const lock(mutex);
      loaded[staged->id] = (*content)->outline().digest.high - 1;
    }
  }

  // Replaces files and takes adapters out.
  void change_at_random() {
    std::minstd_rand random(99);
    while (!stop) {
      std::size_t const name = random() % names.size();
      newest[name] = random() % versions;
      tier.forget(names[name]);
      auto const unloaded = pool.unload(names[random() % names.size()]);
      check(unloaded ? Errc::ok : unloaded.error().code);
      std::this_thread::yield();
    }
  }
};

/// One row's request.
struct Request {
  Lease lease;
  std::size_t name = 0;
  int steps_left = 0;
};

struct Served {
  std::array<std::uint64_t, names.size()> outputs{};  // row steps with the adapter
  std::uint64_t adapted = 0;                          // the sum of them
  std::uint64_t base = 0;
  std::uint64_t steps = 0;
  std::uint64_t wrong = 0;
  std::map<std::uint64_t, std::size_t> version_of;  // by id, as outputs show
};

/// Decodes while everything else goes on.
Served decode(Server& server, QuietRun const& quiet) {
  Decoder decoder(server.pool);
  std::minstd_rand random(7);
  std::array<Request, rows> requests;
  Served served;
  while (served.steps < least_steps || served.adapted < least_adapted ||
         server.pool.snapshot().counters.evictions == 0) {
    ++served.steps;
    expect(server.pool.begin_step(stream));
    std::array<std::int32_t, rows> slots{};
    for (std::size_t row = 0; row < rows; ++row) {
      Request& request = requests[row];
      if (request.steps_left-- <= 0) {  // the next request; base, when its adapter is not there
        request.name = random() % names.size();
        request.steps_left = static_cast<int>(random() % 20);
        auto lease = server.pool.acquire(names[request.name]);
        request.lease = lease ? *std::move(lease) : Lease();
      }
      slots[row] = request.lease.slot();
    }
    Outputs const outputs = decoder.step(slots);
    for (std::size_t row = 0; row < rows; ++row) {
      Request const& request = requests[row];
      if (!request.lease) {
        ++served.base;
        if (!same_bits(outputs[row], quiet.base[row])) ++served.wrong;
        continue;
      }
      ++served.outputs[request.name];
      ++served.adapted;
      std::size_t version = 0;
      while (version < versions && !same_bits(outputs[row], quiet.adapted[request.name][version][row]))
        ++version;
      auto const known = served.version_of.try_emplace(request.lease.id(), version).first;
      if (version == versions || known->second != version) ++served.wrong;
    }
    expect(server.pool.end_step(stream));
  }
  return served;
}

void print(Server const& server, Served const& served) {
  std::cout << "slot  name  generation  rank  bytes  leases\n";
  PoolSnapshot const pool = server.pool.snapshot();
  for (std::size_t i = 0; i < pool.slots.size(); ++i) {
    SlotStatus const& slot = pool.slots[i];
    std::cout << std::setw(4) << i << std::setw(6) << (slot.name.empty() ? "-" : slot.name) << std::setw(12)
              << slot.generation << std::setw(6) << slot.rank << std::setw(7) << slot.bytes << std::setw(8)
              << slot.leases << '\n';
  }
  std::cout << "\nadapter  outputs\n";
  for (std::size_t name = 0; name < names.size(); ++name) {
    std::cout << std::setw(7) << names[name] << std::setw(9) << served.outputs[name] << '\n';
  }
  std::cout << std::setw(7) << "base" << std::setw(9) << served.base << "\n\n";
  PoolCounters const& counters = pool.counters;
  HostTierCounters const host = server.tier.snapshot().counters;
  std::cout << "pool: " << counters.loads << " loads, " << counters.hits << " hits, " << counters.publications
            << " publications, " << counters.evictions << " evictions, " << counters.unloads << " unloads, "
            << counters.leases << " leases; refused: " << counters.refused(Errc::pool_full) << " pool_full, "
            << counters.refused(Errc::spare_busy) << " spare_busy, " << counters.refused(Errc::slot_busy)
            << " slot_busy\n"
            << "host: " << host.reads << " reads, " << host.hits << " hits, " << host.evictions
            << " evictions\n";
}

}  // namespace

int main() {
  // 1. What each adapter gives alone.
  Server server;
  QuietRun const quiet(server.shape);

  // 2. Decode while three threads change what is in the pool.
  std::vector<std::thread> threads;
  threads.emplace_back([&] { server.promote_at_random(1); });
  threads.emplace_back([&] { server.promote_at_random(2); });
  threads.emplace_back([&] { server.change_at_random(); });
  Served const served = decode(server, quiet);
  server.stop = true;
  for (std::thread& thread : threads) thread.join();

  // 3. Outputs were right, and ids mean what loads were told.
  std::uint64_t mistaken = 0;
  for (auto const& [id, version] : served.version_of) mistaken += server.loaded[id] != version ? 1U : 0U;
  print(server, served);
  std::cout << served.steps << " steps of " << rows << " rows, " << served.adapted
            << " outputs with adapters: " << served.wrong << " wrong, " << mistaken << " ids mistaken, "
            << server.refused_for_no_reason << " refusals without a reason\n";
  return served.wrong == 0 && mistaken == 0 && server.refused_for_no_reason == 0 ? 0 : 1;
}
