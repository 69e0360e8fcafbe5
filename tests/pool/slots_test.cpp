// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/slots.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace atlas::lora;
using detail::SlotLedger;

static_assert(std::is_nothrow_move_constructible_v<Lease> && std::is_nothrow_move_assignable_v<Lease>);
static_assert(!std::is_copy_constructible_v<Lease> && !std::is_copy_assignable_v<Lease>);
static_assert(SlotKey{}.slot == base_slot);

// A ledger with one stream, and content in as many slots as there are names.
SlotLedger::Owner ledger_with(std::vector<std::string> const& names, std::int32_t max_slots) {
  auto ledger = SlotLedger::create(max_slots, 0, max_slots + 1);
  ledger->streams.emplace_back();
  for (std::size_t i = 0; i < names.size(); ++i) {
    detail::Tenant tenant;
    tenant.name = names[i];
    tenant.id = adapter_id(names[i]);
    tenant.place = *ledger->take_place();
    static_cast<void>(ledger->stage(static_cast<std::int32_t>(i), tenant));
    ledger->publish(ledger->slots[i]);
  }
  return ledger;
}

Lease acquire(SlotLedger& ledger, std::string const& name) {
  auto lease = ledger.acquire(name);
  REQUIRE(lease.has_value());
  return *std::move(lease);
}

TEST_CASE("leases count, their ticks order uses, and a release moves neither tick") {
  auto const ledger = ledger_with({"zero", "one"}, 2);
  std::uint64_t const published = ledger->view(1).last_use;
  Lease first = acquire(*ledger, "zero");
  CHECK(ledger->view(0).leases == 1);
  CHECK(ledger->view(0).last_use == published + 1);
  Lease second = acquire(*ledger, "one");
  CHECK(ledger->view(1).last_use == published + 2);
  Lease third = acquire(*ledger, "zero");
  CHECK(ledger->view(0).leases == 2);
  CHECK(ledger->view(0).last_use == published + 3);
  first.release();
  third.release();
  third.release();  // once more does nothing
  CHECK(ledger->view(0).leases == 0);
  CHECK(ledger->view(0).last_use == published + 3);
  CHECK(ledger->view(1).last_use == published + 2);
  CHECK(ledger->acquire("ninety-nine").error().code == Errc::not_found);
  CHECK(ledger->acquire("").error().code == Errc::not_found);
  CHECK(ledger->acquire(SlotKey{99, 1}).error().code == Errc::stale);
}

TEST_CASE("a release waits for the step that was open, or the last one that ended, and for no later one") {
  auto const ledger = ledger_with({"a"}, 1);
  detail::StreamProgress& stream = ledger->streams[0];
  ledger->open_step(0, ledger->number_step());  // step 1
  acquire(*ledger, "a").release();
  CHECK_FALSE(ledger->view(0).idle);
  stream = {0, 1, 0};  // it has ended
  CHECK_FALSE(ledger->view(0).idle);
  ledger->open_step(0, ledger->number_step());
  stream = {2, 2, 1};  // it is done, and step 2 open
  CHECK(ledger->view(0).idle);
  stream = {0, 2, 1};
  acquire(*ledger, "a").release();
  CHECK_FALSE(ledger->view(0).idle);
  ledger->open_step(0, ledger->number_step());
  stream = {3, 3, 2};
  CHECK(ledger->view(0).idle);
}

TEST_CASE("a stream that comes later has not read what was released before") {
  auto const ledger = ledger_with({"a"}, 1);
  acquire(*ledger, "a").release();
  ledger->streams.emplace_back();
  ledger->open_step(1, ledger->number_step());
  CHECK(ledger->view(0).idle);
  acquire(*ledger, "a").release();
  CHECK_FALSE(ledger->view(0).idle);
}

TEST_CASE("a record waits for the stream that wrote it, and for no step of another one") {
  auto const ledger = ledger_with({"a"}, 1);
  ledger->streams.emplace_back();
  ledger->overwrite(ledger->slots[0], 0, ledger->number_step());  // and step 1 could not begin
  CHECK_FALSE(ledger->unread(ledger->slots[0]));
  ledger->streams[1].passed = 2;
  CHECK_FALSE(ledger->unread(ledger->slots[0]));
  ledger->streams[0].passed = 3;
  CHECK(ledger->unread(ledger->slots[0]));
}

TEST_CASE("a slot is claimed only while nobody is in it, and is as it was when somebody is") {
  auto const ledger = ledger_with({"a"}, 1);
  Lease lease = acquire(*ledger, "a");
  CHECK_FALSE(ledger->claim(ledger->slots[0]));
  CHECK(ledger->try_acquire(lease.key()).has_value());
  ledger->open_step(0, ledger->number_step());
  SlotKey const key = lease.key();
  lease.release();
  CHECK_FALSE(ledger->claim(ledger->slots[0]));  // the step is open
  CHECK(ledger->try_acquire(key).has_value());
  ledger->streams[0] = {0, detail::no_step, 1};
  CHECK(ledger->claim(ledger->slots[0]));
  CHECK_FALSE(ledger->try_acquire(key).has_value());
}

TEST_CASE("a tenancy is never given twice, neither to a slot nor in a pool") {
  auto const ledger = ledger_with({"a", "b"}, 2);
  std::vector<std::uint64_t> seen{ledger->slots[0].tenant->tenancy, ledger->slots[1].tenant->tenancy};
  for (int i = 0; i < 5; ++i) {
    detail::Tenant tenant;
    tenant.name = i % 2 == 0 ? "c" : "d";
    tenant.place = *ledger->take_place();
    REQUIRE(ledger->claim(ledger->slots[static_cast<std::size_t>(i % 2)]));
    std::uint64_t const tenancy = ledger->stage(i % 2, tenant).tenancy;
    for (std::uint64_t const earlier : seen) CHECK(tenancy != earlier);
    seen.push_back(tenancy);
    ledger->publish(ledger->slots[static_cast<std::size_t>(i % 2)]);
    ledger->settle();
  }
}

TEST_CASE("a place is somebody's or spare, and an unload gives it back") {
  auto const ledger = ledger_with({"a", "b"}, 2);
  CHECK(ledger->take_place().has_value());  // the spare one
  CHECK_FALSE(ledger->take_place().has_value());
  REQUIRE(ledger->unload("a").has_value());
  CHECK(ledger->take_place().has_value());
  CHECK_FALSE(ledger->take_place().has_value());
  CHECK(ledger->slots[0].blank_due);
  CHECK(ledger->view(0).state == SlotState::empty);
  ledger->active = "b";
  CHECK(ledger->unload("b").error().code == Errc::invalid_argument);
  CHECK(ledger->view(1).state == SlotState::ready);
}

TEST_CASE("the first slot with the name is found, and the empty name finds none") {
  auto const ledger = ledger_with({"alpha", "beta", "gamma"}, 4);
  CHECK(ledger->published("alpha") == 0);
  CHECK(ledger->published("beta") == 1);
  CHECK(ledger->published("gamma") == 2);
  CHECK(ledger->published("delta") == base_slot);
  CHECK(ledger->published("") == base_slot);
}

TEST_CASE("leases outlive their ledger, whichever goes last, and the last one ends it") {
  auto ledger = ledger_with({"a", "b", "c"}, 3);  // a leak or an early end is a sanitizer's to find
  Lease first = acquire(*ledger, "a");
  Lease second = acquire(*ledger, "a");
  Lease third = acquire(*ledger, "c");
  ledger.reset();
  CHECK(first.slot() == 0);
  third.release();
  first.release();
  CHECK(second.id() == adapter_id("a"));
  second = Lease();
  CHECK_FALSE(second);
  ledger = ledger_with({"a"}, 1);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([lease = acquire(*ledger, "a")]() mutable { lease.release(); });
  }
  ledger.reset();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
