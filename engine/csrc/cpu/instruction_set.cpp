// The kernels of one instruction set. This file is compiled once for each instruction set, with the compiler flags and
// the values of RL_ISA and RL_TABLE for this set.

#include "attention.h"
#include "grouped.h"
#include "int8.h"
#include "kernels.h"
#include "linear.h"
#include "routing.h"
#include "rows.h"
#include "sampler_passes.h"

#define RL_JOIN2(a, b) a##b
#define RL_JOIN(a, b) RL_JOIN2(a, b)

namespace RL_ISA {

template <class Operand>
constexpr Kernels table() {
    return {
        (int32_t)sizeof(typename Operand::X),
        pack_weight<Operand>,
        embed<Operand>,
        {linear<Operand>, add_linear<Operand>, gate_linear<Operand>, scatter_linear<Operand>},
        {int8_linear<Operand>, int8_add_linear<Operand>, int8_gate_linear<Operand>, int8_scatter_linear<Operand>},
        grouped_kernels<Operand, Nibbles>(),
        grouped_kernels<Operand, Floats>(),
        grouped_kernels<Operand, Sixes>(),
        grouped_kernels<Operand, Bytes>(),
        pack_int8_block<Operand>,
        embed_int8,
        quantise_row<Operand>,
        quantised_row_bytes,
        scale<Operand>,
        gate<Operand>,
        rms_norm<Operand>,
        add_row,
        route,
        sigmoid,
        rotate_and_write<Operand>,
        attend<Operand>,
        attend_segment<Operand>,
        combine<Operand>,
    };
}

}  // namespace RL_ISA

extern const Kernels RL_JOIN(RL_TABLE, Float32) = RL_ISA::table<RL_ISA::Float32>();
extern const Kernels RL_JOIN(RL_TABLE, BFloat16) = RL_ISA::table<RL_ISA::BFloat16>();
extern const SamplerPasses RL_JOIN(RL_TABLE, Sampler) = {
    RL_ISA::find_highest, RL_ISA::divide, RL_ISA::mask, RL_ISA::draw, RL_ISA::mass, RL_ISA::collect, RL_ISA::count,
};
