// SPDX-License-Identifier: AGPL-3.0-only
//
// The delta inside a kernel of the engine's own, which does with it what the library's kernels do not: adds
// it to another buffer, applies an activation, quantizes. A block takes row tiles of the plan:
//
//     __global__ void mine(__grid_constant__ DeviceDelta<T> const delta, ...) {
//       extern __shared__ float4 shared[];             // delta.shared_bytes()
//       DeltaBlock<T> block(delta, shared);
//       for (std::int32_t tile = blockIdx.x; block.load(tile); tile += gridDim.x) {
//         block.shrink();
//         block.expand(Share{0, delta.output_tiles()}, [&](DeltaRun const& run) { ... });
//       }
//     }
//
// The delta's bits are those of every other form. Rows that are in no tile of the plan are base and are not
// visited; the kernel does for them what it does without a delta. Weights are read with ordinary loads, and
// nothing here waits for other kernels: a kernel that is launched programmatically waits first, all blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/delta.cuh"
#include "atlas/lora/kernels/delta_params.hpp"
#include "atlas/lora/kernels/expand.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/shrink.cuh"
#include "atlas/lora/kernels/split_kernels.cuh"
#include "atlas/lora/kernels/work.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

template <Element T>
class DeltaBlock;

/// The operands of a delta as a kernel takes them: trivially copyable, by value, `__grid_constant__`. Made by
/// `device_delta`.
template <Element T>
class DeviceDelta {
 public:
  /// Dynamic shared memory of a block, aligned to 16: 24 KB and eight rows of xa. Where that is more than 48
  /// KB, the kernel needs `cudaFuncAttributeMaxDynamicSharedMemorySize`.
  [[nodiscard]] constexpr std::size_t shared_bytes() const noexcept {
    return sums_bytes + detail::xa_bytes(operands_.xa_shared_stride, sizeof(T));
  }
  /// Row tiles that the plan can hold; a grid of more blocks does nothing more.
  [[nodiscard]] constexpr std::int32_t max_tiles() const noexcept {
    return max_row_tiles(operands_.rows, operands_.plan.max_groups);
  }
  /// Output tiles of all projections, in their order: what `DeltaBlock::expand` takes a share of.
  [[nodiscard]] ATLAS_HD std::int32_t output_tiles() const noexcept {
    return detail::total_output_tiles(operands_);
  }

 private:
  friend class DeltaBlock<T>;
  template <Element E, Element Y>
  friend Result<DeviceDelta<E>> device_delta(DeltaParams<E, Y> const& params);

  // Chunk sums, and the segment sums of one rank tile.
  static constexpr std::size_t sums_bytes =
      detail::chunk_bytes + sizeof(float4) * max_segments * detail::warp_threads;

  detail::Operands<T, T> operands_;
};
static_assert(std::is_trivially_copyable_v<DeviceDelta<float>>);

/// The operands of `params` for a kernel of the caller's. Of its projections the tables are used and y is
/// not, which may be null; neither are its scratch and `inputs_settled`. Error: `invalid_argument` for
/// parameters that `launch_delta` would refuse.
template <Element T, Element Y>
[[nodiscard]] Result<DeviceDelta<T>> device_delta(DeltaParams<T, Y> const& params) {
  DeviceDelta<T> delta;
  detail::Operands<T, T>& p = delta.operands_;
  p.x = params.x;
  p.x_row_stride = params.x_row_stride;
  p.rows = params.rows;
  p.plan = params.plan;
  p.num_projections = params.num_projections;
  for (int i = 0; i < max_projections; ++i) p.projections[i].table = params.projections[i].table;
  if (!detail::complete(p, true, false) || !detail::usable(p.plan, p.rows)) {
    return fail(Errc::invalid_argument, "device_delta: x, plan or a table is not usable");
  }
  return delta;
}

/// Eight consecutive outputs of one row, or the last few: what an epilogue is given.
struct DeltaRun {
  std::int32_t row = 0;         ///< of x and y
  std::int32_t projection = 0;  ///< in `[0, num_projections)`
  std::int64_t n = 0;           ///< the first output, a multiple of 8
  std::int32_t count = 0;  ///< 1 to 8: outputs that there are; the elements of `delta` beyond mean nothing
  bool adapted =
      false;  ///< whether the row's slot adapts this projection; if not, `delta` is zero, `scale` too
  float scale = 0.0F;
  float delta[pack_elements] = {};  ///< rounded to T, not scaled
  /// y's element `e` with the delta, in f32: `y + scale * delta`, the product rounded before the sum.
  [[nodiscard]] __device__ float folded(float y, int e) const {
    return adapted ? detail::add_rn(y, detail::mul_rn(scale, delta[e])) : y;
  }
};

/// A block at work on row tiles. All its threads, whole warps and at most 1,024, make one and call each
/// function, which synchronises the block.
template <Element T>
class DeltaBlock {
 public:
  /// `shared` is `delta.shared_bytes()` bytes of shared memory, aligned to 16. The row tile itself takes some
  /// more, static.
  __device__ DeltaBlock(DeviceDelta<T> const& delta, void* shared)
      : p_(delta.operands_),
        tile_(detail::shared_row_tile<T>()),
        chunks_(static_cast<float4*>(shared)),
        segments_(chunks_ + detail::chunk_bytes / sizeof(float4)),
        xa_(reinterpret_cast<T*>(static_cast<std::byte*>(shared) + DeviceDelta<T>::sums_bytes)) {}

  /// Takes up row tile `index` of the plan; false when there is none.
  __device__ bool load(std::int32_t index) {
    detail::load_row_tile(tile_, detail::PlanSource{}, p_, index);
    return tile_.exists != 0;
  }

  /// The first half: xa of the tile's rows, all of it, into shared memory.
  __device__ void shrink() {
    detail::clear_xa(p_, xa_);
    if (tile_.wide != 0 && p_.wide) {
      shrink_as<true>();
    } else {
      shrink_as<false>();
    }
  }

  /// The second half: calls `epilogue(run)` with a `DeltaRun` for every row of the tile and every eight
  /// outputs of the output tiles `tiles`, once each, from one thread. Several blocks may take a tile each
  /// with its share
  /// (`share_of`), and then each has its own `shrink`.
  template <class Epilogue>
  __device__ void expand(Share tiles, Epilogue const& epilogue) const {
    if (tile_.wide != 0) {
      expand_as<true>(tiles, epilogue);
    } else {
      expand_as<false>(tiles, epilogue);
    }
  }

 private:
  template <bool Wide>
  __device__ void shrink_as() {
    using Source = detail::PlanSource;
    Share const all{0, Contraction(p_.k_in).segments()};
    auto const put = [this](int, std::int32_t segment, std::int32_t, int lane, float4 const& sum) {
      segments_[segment * detail::warp_threads + lane] = sum;
    };
    auto const get = [this](std::int32_t segment, std::int32_t, int lane) {
      return segments_[segment * detail::warp_threads + lane];
    };
    for (std::int32_t rank = 0; rank < tile_.first_rank_tile[max_projections]; ++rank) {
      Share const ranks{rank, rank + 1};
      detail::shrink_segments<Source, Wide>(tile_, p_, all, ranks, chunks_, 1, put);
      detail::fold_segments<Source>(tile_, p_, ranks, static_cast<int>(threadIdx.x),
                                    static_cast<int>(blockDim.x), get, detail::SharedXa<T, T>{p_, xa_});
      __syncthreads();  // before the next sums, and before xa is read
    }
  }

  template <bool Wide, class Epilogue>
  __device__ void expand_as(Share tiles, Epilogue const& epilogue) const {
    int const warps = static_cast<int>(blockDim.x) / detail::warp_threads;
    for (std::int32_t t = tiles.first + static_cast<int>(threadIdx.x) / detail::warp_threads; t < tiles.last;
         t += warps) {
      DeltaRun run;
      std::int32_t local = t;
      while (local >= lora::output_tiles(p_.projections[run.projection].table.n_out)) {
        local -= lora::output_tiles(p_.projections[run.projection].table.n_out);
        ++run.projection;
      }
      RouteCell<T> const& cell = tile_.cell[run.projection];
      std::int64_t const n_out = p_.projections[run.projection].table.n_out;
      std::int64_t const first = static_cast<std::int64_t>(local) * tile_outputs;
      run.row = tile_.row[detail::group()];
      run.n = first + detail::quad() * pack_elements;
      run.adapted = cell.rank > 0;
      if (run.adapted) {
        run.scale = cell.scale;
        auto const pack = detail::expand_outputs<Wide>(cell, cell.rank, n_out, first,
                                                       xa_ + detail::xa_shared_offset(p_, run.projection),
                                                       p_.xa_shared_stride);
#pragma unroll
        for (int e = 0; e < pack_elements; ++e) run.delta[e] = detail::element(pack, e);
      }
      run.count = static_cast<std::int32_t>(min(n_out - run.n, std::int64_t{pack_elements}));
      if (run.row >= 0 && run.count > 0) epilogue(run);
    }
  }

  detail::Operands<T, T> const& p_;
  detail::RowTile<T>& tile_;
  float4* chunks_;
  float4* segments_;
  T* xa_;
};

}  // namespace atlas::lora::inline v0
