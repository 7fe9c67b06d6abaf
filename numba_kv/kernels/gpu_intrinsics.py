"""Instructions of a GPU that Numba does not write by itself: wide accesses, and conversions of packed elements.

Each function returns an intrinsic for Numba's CUDA compiler. They are what the primitives of `wide_access` and `wide_values`
become; those say what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba_kv.kernels.numba_targets import cuda_module

__all__ = [
    "float_operation",
    "grid_control",
    "load_bytes",
    "load_floats",
    "narrow_elements",
    "narrow_results",
    "store_bytes",
    "store_floats",
    "widen_elements",
]

_SIGN = 0x80000000
#: What rounds two float32 to a pair of elements, the first operand to the upper one: text, result's letter and bits, NaN.
_NARROW = {
    "float16": ("cvt.rn.f16x2.f32 $0, $1, $2;", "r", 16, 0x7E00),
    "bfloat16": ("cvt.rn.bf16x2.f32 $0, $1, $2;", "r", 16, 0x7FC0),
    "float8": ("cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", "h", 8, 0x7F),
}

#: What makes all ones but the sign, which the instructions above make of a NaN, the one positive NaN of the type.
_MEND = {
    "float16": "set.nan.u32.f16x2 m, $1, $1; and.b32 m, m, 0x01FF01FF; not.b32 m, m; and.b32 $0, $1, m;",
    "bfloat16": "set.nan.u32.bf16x2 m, $1, $1; and.b32 m, m, 0x003F003F; not.b32 m, m; and.b32 $0, $1, m;",
}

#: What ``createpolicy.fractional.L2::evict_last`` gives for all of an access.
_EVICT_LAST = 0x14F0000000000000


def _intrinsic() -> tuple[Any, Any, Any]:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    return ir, types, intrinsic


def _pointer(ir: Any, context: Any, builder: Any, array_type: Any, array: Any, at: Any, element: Any) -> Any:
    """Return where byte `at` of the array is in the global space, in which every array of a kernel lies."""
    data = context.make_array(array_type)(context, builder, array).data
    place = builder.addrspacecast(builder.gep(data, [at]), ir.PointerType(ir.IntType(8), 1))
    return builder.bitcast(place, ir.PointerType(element, 1))


def grid_control(what: str) -> Any:
    """Return ``()``, which lets a kernel overlap its neighbours on a stream, from compute capability 9.0 on.

    ``wait`` returns once the kernel before, and all that this one waited for, is done and visible; no memory that other work
    writes or reads is touched before. Behind ``launch_dependents`` of all its blocks those of the next kernel may start.
    """
    ir, types, intrinsic = _intrinsic()

    @intrinsic
    def control(typingctx):
        def codegen(context, builder, signature, arguments):
            builder.asm(ir.FunctionType(ir.VoidType(), []), f"griddepcontrol.{what};", "~{memory}", [], True)
            return context.get_dummy_value()

        return types.void(), codegen

    return control


def load_bytes(count: int, *, kept: bool = False) -> Any:
    """Return ``(memory, at) -> uint64``, or a pair of them for 16 bytes; `at` is a multiple of `count`.

    With `kept`, 16 bytes are the last to leave the cache of the GPU.

    Loads of 8 and 16 bytes stay where they are written: the compiler would move them behind the branch that uses them, where
    they wait for what decides it.
    """
    ir, types, intrinsic = _intrinsic()
    word = ir.IntType(64)
    pair = types.UniTuple(types.uint64, 2)

    def fixed_load(context: Any, builder: Any, memory: Any, arguments: Any) -> Any:
        place = _pointer(ir, context, builder, memory, arguments[0], arguments[1], ir.IntType(8))
        place = builder.ptrtoint(place, word)
        if count == 8:
            return builder.asm(ir.FunctionType(word, [word]), "ld.global.u64 $0, [$1];", "=l,l", [place], True)
        two = ir.FunctionType(ir.LiteralStructType([word, word]), [word])
        if kept:
            two = ir.FunctionType(ir.LiteralStructType([word, word]), [word, word])
            text = "ld.global.L2::cache_hint.v2.u64 {$0, $1}, [$2], $3;"
            both = builder.asm(two, text, "=l,=l,l,l", [place, ir.Constant(word, _EVICT_LAST)], True)
        else:
            both = builder.asm(two, "ld.global.v2.u64 {$0, $1}, [$2];", "=l,=l,l", [place], True)
        return context.make_tuple(builder, pair, [builder.extract_value(both, i) for i in range(2)])

    @intrinsic
    def load(typingctx, memory, at):
        def codegen(context, builder, signature, arguments):
            if count >= 8:
                return fixed_load(context, builder, memory, arguments)
            array, place = arguments
            value = builder.load(_pointer(ir, context, builder, memory, array, place, ir.IntType(8 * count)))
            value.align = count
            return builder.zext(value, word)

        return (pair if count == 16 else types.uint64)(memory, at), codegen

    return load


def store_bytes(count: int, *, guarded: bool = False) -> Any:
    """Return ``(memory, at, word)``, or ``(memory, at, low, high)`` for 16 bytes; `at` is a multiple of `count`.

    A guarded store, of 8 or 16 bytes, takes whether it is wanted behind these. It is one instruction without a branch: behind
    a branch the compiler would put the loads of what is stored, too, to wait there for what decides it.
    """
    ir, types, intrinsic = _intrinsic()
    word = ir.IntType(64)

    def fixed_store(context: Any, builder: Any, memory: Any, arguments: Any) -> Any:
        array, at, *parts = arguments
        place = builder.ptrtoint(_pointer(ir, context, builder, memory, array, at, ir.IntType(8)), word)
        kinds, names = [word] * (1 + count // 8), "$1" if count == 8 else "{$1, $2}"
        text = f"st.global{'.v2' if count == 16 else ''}.u64 [$0], {names};"
        constraints = ",".join("l" * len(kinds))
        if guarded:
            parts[-1] = builder.zext(parts[-1], ir.IntType(32))
            text = f"{{ .reg .pred p; setp.ne.u32 p, ${len(kinds)}, 0; @p {text} }}"
            kinds, constraints = [*kinds, ir.IntType(32)], f"{constraints},r"
        builder.asm(ir.FunctionType(ir.VoidType(), kinds), text, f"{constraints},~{{memory}}", [place, *parts], True)
        return context.get_dummy_value()

    if guarded and count == 8:

        @intrinsic
        def store_word_if(typingctx, memory, at, word, is_wanted):
            def codegen(context, builder, signature, arguments):
                return fixed_store(context, builder, memory, arguments)

            return types.void(memory, at, types.uint64, types.boolean), codegen

        return store_word_if

    if guarded:

        @intrinsic
        def store_pair_if(typingctx, memory, at, low, high, is_wanted):
            def codegen(context, builder, signature, arguments):
                return fixed_store(context, builder, memory, arguments)

            return types.void(memory, at, types.uint64, types.uint64, types.boolean), codegen

        return store_pair_if

    if count == 16:

        @intrinsic
        def store_pair(typingctx, memory, at, low, high):
            def codegen(context, builder, signature, arguments):
                return fixed_store(context, builder, memory, arguments)

            return types.void(memory, at, types.uint64, types.uint64), codegen

        return store_pair

    @intrinsic
    def store(typingctx, memory, at, value):
        def codegen(context, builder, signature, arguments):
            array, place, part = arguments
            element = ir.IntType(8 * count)
            part = part if count == 8 else builder.trunc(part, element)
            builder.store(part, _pointer(ir, context, builder, memory, array, place, element)).align = count
            return context.get_dummy_value()

        return types.void(memory, at, types.uint64), codegen

    return store


def _four_floats(ir: Any, context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """Return where four floats are, as a vector: element `at` of the array, a multiple of 4."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), ir.PointerType(ir.VectorType(ir.FloatType(), 4)))


def load_floats() -> Any:
    """Return ``(memory, at) -> four float32``, wherever the memory is; `at` is a multiple of 4."""
    ir, types, intrinsic = _intrinsic()
    result = types.UniTuple(types.float32, 4)

    @intrinsic
    def load(typingctx, memory, at):
        def codegen(context, builder, signature, arguments):
            four = builder.load(_four_floats(ir, context, builder, memory, *arguments))
            four.align = 16
            parts = [builder.extract_element(four, ir.Constant(ir.IntType(32), i)) for i in range(4)]
            return context.make_tuple(builder, result, parts)

        return result(memory, at), codegen

    return load


def store_floats() -> Any:
    """Return ``(memory, at, four float32)``, wherever the memory is; `at` is a multiple of 4."""
    ir, types, intrinsic = _intrinsic()

    @intrinsic
    def store(typingctx, memory, at, numbers):
        def codegen(context, builder, signature, arguments):
            array, place, parts = arguments
            four = ir.Constant(ir.VectorType(ir.FloatType(), 4), ir.Undefined)
            for i in range(4):
                four = builder.insert_element(four, builder.extract_value(parts, i), ir.Constant(ir.IntType(32), i))
            builder.store(four, _four_floats(ir, context, builder, memory, array, place)).align = 16
            return context.get_dummy_value()

        return types.void(memory, at, numbers), codegen

    return store


def _widened(ir: Any, builder: Any, word: Any, kind: str, mends: bool) -> list[Any]:
    """Return the float32 of the elements of a 64-bit word; exact."""
    i16, i32, f32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
    floats = []

    def const(value: int) -> Any:
        return ir.Constant(i32, value)

    for half in range(2):
        bits = builder.trunc(builder.lshr(word, ir.Constant(ir.IntType(64), 32 * half)), i32)
        if kind == "bfloat16":
            floats += [builder.shl(bits, const(16)), builder.and_(bits, const(0xFFFF0000))]
            continue
        for pair in range(2) if kind == "float8" else (0,):
            halves = bits
            if kind == "float8":
                small = builder.trunc(builder.lshr(bits, const(16 * pair)), i16)
                convert = ir.FunctionType(i32, [i16])
                halves = builder.asm(convert, "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [small], False)
            both = builder.bitcast(halves, ir.VectorType(ir.HalfType(), 2))
            for i in range(2):
                value = builder.fpext(builder.extract_element(both, const(i)), f32)
                if not mends:
                    floats.append(builder.bitcast(value, i32))
                    continue
                up = 24 - 16 * pair - 8 * i if kind == "float8" else 16 - 16 * i
                sign = builder.and_(builder.shl(bits, const(up)), const(_SIGN))
                floats.append(builder.or_(builder.bitcast(value, i32), sign))
    return [builder.bitcast(bits, f32) for bits in floats]


def widen_elements(kind: str, *, mends: bool = True) -> Any:
    """Return ``word -> float32 of each of its elements``.

    With `mends` a NaN keeps its sign, which the instructions of all kinds but bfloat16 drop.
    """
    ir, types, intrinsic = _intrinsic()
    result = types.UniTuple(types.float32, 8 if kind == "float8" else 4)

    @intrinsic
    def widen(typingctx, word):
        def codegen(context, builder, signature, arguments):
            return context.make_tuple(builder, result, _widened(ir, builder, arguments[0], kind, mends))

        return result(types.uint64), codegen

    return widen


def _mended(ir: Any, builder: Any, packed: Any, values: Any, kind: str) -> Any:
    """Return a packed word with each NaN among its float32 as the one NaN of its sign."""
    _, _, bits, nan = _NARROW[kind]
    word, i32 = ir.IntType(64), ir.IntType(32)
    mended = packed
    for i, value in enumerate(values):
        place, element = bits * i, (1 << bits) - 1
        is_negative = builder.icmp_signed("<", builder.bitcast(value, i32), ir.Constant(i32, 0))
        positive, negative = (ir.Constant(word, n << place) for n in (nan, nan | 1 << bits - 1))
        others = builder.and_(mended, ir.Constant(word, ~(element << place) & (1 << 64) - 1))
        with_nan = builder.or_(others, builder.select(is_negative, negative, positive))
        mended = builder.select(builder.fcmp_unordered("uno", value, value), with_nan, mended)
    return mended


def _narrowed(ir: Any, builder: Any, values: Any, kind: str, mends: bool, of_results: bool = False) -> list[Any]:
    """Return float32 as words of elements; whether any is NaN is asked once: a branch stands in its neighbours' way.

    Of results, whose NaN are positive, it is not asked at all.
    """
    text, letter, bits, _ = _NARROW[kind]
    word, f32 = ir.IntType(64), ir.FloatType()
    convert = ir.FunctionType(ir.IntType(2 * bits), [f32, f32])
    each = 64 // bits
    parts = [values[i : i + each] for i in range(0, len(values), each)]
    words, has_nan = [], None
    for part in parts:
        packed = None
        for i in range(0, each, 2):
            low, high = part[i], part[i + 1]
            pair = builder.asm(convert, text, f"={letter},f,f", [high, low], False)
            if of_results:
                mend = ir.FunctionType(pair.type, [pair.type])
                pair = builder.asm(mend, f"{{ .reg .b32 m; {_MEND[kind]} }}", "=r,r", [pair], False)
            pair = builder.zext(pair, word)
            pair = builder.shl(pair, ir.Constant(word, bits * i))
            is_nan = builder.fcmp_unordered("uno", low, high)
            packed = pair if packed is None else builder.or_(packed, pair)
            has_nan = is_nan if has_nan is None else builder.or_(has_nan, is_nan)
        words.append(packed)
    if not mends or of_results:
        return words
    before = builder.block
    with builder.if_then(has_nan, likely=False):
        mended = [_mended(ir, builder, *each, kind) for each in zip(words, parts, strict=True)]
        inside = builder.block
    found = []
    for packed, whole in zip(words, mended, strict=True):
        found.append(builder.phi(word))
        found[-1].add_incoming(packed, before)
        found[-1].add_incoming(whole, inside)
    return found


def narrow_elements(kind: str, *, of_results: bool = False) -> Any:
    """Return ``eight float32 -> word``, or two words of types of 16 bits; rounded to nearest even; float8 saturates.

    A NaN is the one NaN of its sign, `of_results` of a GPU's operations, of 16 bits, the positive one.
    """
    ir, types, intrinsic = _intrinsic()
    result = types.uint64 if kind == "float8" else types.UniTuple(types.uint64, 2)

    @intrinsic
    def narrow_eight(typingctx, a, b, c, d, e, f, g, h):
        def codegen(context, builder, signature, arguments):
            words = _narrowed(ir, builder, arguments, kind, True, of_results)
            return words[0] if kind == "float8" else context.make_tuple(builder, result, words)

        return result(*[types.float32] * 8), codegen

    return narrow_eight


def narrow_results(kind: str) -> Any:
    """Return ``four float32 -> word`` of a type of 16 bits, rounded to nearest even.

    A NaN is what the instruction makes of it: all ones but the sign.
    """
    ir, types, intrinsic = _intrinsic()

    @intrinsic
    def narrow_four(typingctx, a, b, c, d):
        def codegen(context, builder, signature, arguments):
            return _narrowed(ir, builder, arguments, kind, False)[0]

        return types.uint64(*[types.float32] * 4), codegen

    return narrow_four


def float_operation(name: str) -> Callable[..., Any]:
    """Return a function of libdevice, which is rounded by itself: the compiler fuses it with no other."""
    found: Callable[..., Any] = getattr(cuda_module().libdevice, name)
    return found
