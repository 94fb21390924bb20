"""Translates the PTX of the device kernels to C, so that a CPU executes what nvcc compiled.

A kernel becomes a function that runs one thread. A register becomes a variable, an unsigned integer of its width, and
each instruction one statement. `tests/kernels/ptx.h` has the functions that these statements use. Only instructions
that are listed here are translated. Any other text in the PTX is an error.
"""

import re
from typing import NamedTuple


class UntranslatedError(Exception):
    """The PTX has something that is not listed here."""


class _Operation(NamedTuple):
    """Types of the result and the operands, and the result in C, with operands `a`, `b` and `c`."""

    result: str
    operands: tuple[str, ...]
    c: str


_INTEGERS = [f"{sign}{bits}" for sign in "us" for bits in (16, 32, 64)]
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_HALVES = {"f16": "10, 5", "bf16": "7, 8"}  # bits of mantissa and of exponent


def _operations() -> dict[str, _Operation]:
    found = {}
    for kind in _INTEGERS:
        two = (kind, kind)
        for name, sign in {"add": "+", "sub": "-", "mul.lo": "*", "div": "/"}.items():
            found[f"{name}.{kind}"] = _Operation(kind, two, f"{{a}} {sign} {{b}}")
        for name, sign in {"min": "<", "max": ">"}.items():
            found[f"{name}.{kind}"] = _Operation(kind, two, f"{{a}} {sign} {{b}} ? {{a}} : {{b}}")
        for name, sign in _COMPARISONS.items():
            found[f"setp.{name}.{kind}"] = _Operation("pred", two, f"{{a}} {sign} {{b}}")
        found[f"mad.lo.{kind}"] = _Operation(kind, (*two, kind), "{a} * {b} + {c}")
        found[f"neg.{kind}"] = _Operation(kind, (kind,), "-{a}")
        found[f"shr.{kind}"] = _Operation(kind, (kind, "u32"), "SHIFT(>>, {a}, {b})")
    for kind in ("u16", "s16", "u32", "s32"):
        wide = kind[0] + str(2 * _bits(kind))
        found[f"mul.wide.{kind}"] = _Operation(wide, (kind, kind), f"({_c_type(wide)}){{a}} * {{b}}")
    for kind in ("pred", "b16", "b32", "b64"):
        for name, sign in {"and": "&", "or": "|", "xor": "^"}.items():
            found[f"{name}.{kind}"] = _Operation(kind, (kind, kind), f"{{a}} {sign} {{b}}")
    for kind in ("b16", "b32", "b64"):
        found[f"not.{kind}"] = _Operation(kind, (kind,), "~{a}")
        found[f"shl.{kind}"] = _Operation(kind, (kind, "u32"), "SHIFT(<<, {a}, {b})")
        # These move bits, whatever they mean.
        for sign in {"b16": "bus", "b32": "busf", "b64": "busf"}[kind]:
            found[f"mov.{sign}{kind[1:]}"] = _Operation(kind, (kind,), "{a}")
            found[f"selp.{sign}{kind[1:]}"] = _Operation(kind, (kind, kind, "pred"), "{c} ? {a} : {b}")
    for kind in ("f32", "f64"):
        for name, sign in {"add": "+", "sub": "-", "mul": "*"}.items():
            found[f"{name}.{kind}"] = _Operation(kind, (kind, kind), f"{{a}} {sign} {{b}}")
    found["div.rn.f32"] = _Operation("f32", ("f32", "f32"), "{a} / {b}")
    found["cvta.to.global.u64"] = _Operation("u64", ("u64",), "{a}")
    found["shf.r.wrap.b32"] = _Operation("b32", ("b32", "b32", "u32"), "funnel_right({a}, {b}, {c})")
    found["prmt.b32"] = _Operation("b32", ("b32", "b32", "b32"), "permute({a}, {b}, {c})")
    found["bfi.b64"] = _Operation("b64", ("b64", "b64", "u32", "u32"), "insert_field({a}, {b}, {c}, {d})")
    return found | _conversions()


def _conversions() -> dict[str, _Operation]:
    integers = ["u8", "s8", *_INTEGERS]
    found = {f"cvt.{to}.{of}": _Operation(to, (of,), "{a}") for to in integers for of in integers if to != of}
    found["cvt.f64.f32"] = _Operation("f64", ("f32",), "{a}")
    for half, bits in _HALVES.items():
        found[f"cvt.f32.{half}"] = _Operation("f32", (half,), f"widen({{a}}, {bits})")
        found[f"cvt.rn.{half}.f32"] = _Operation(half, ("f32",), f"narrow({{a}}, {bits})")
    # C converts numbers to the nearest one, too.
    for to in ("f32", "f64"):
        found |= {f"cvt.rn.{to}.{of}": _Operation(to, (of,), "{a}") for of in integers}
    found["cvt.rn.f32.f64"] = _Operation("f32", ("f64",), "{a}")
    return found


def _bits(kind: str) -> int:
    """Returns the width of a type."""
    return 8 if kind == "pred" else int(kind.lstrip("busf"))


def _c_type(kind: str) -> str:
    """Returns the C type of values, which are bits for the 16-bit floats."""
    if kind in ("f32", "f64"):
        return {"f32": "float", "f64": "double"}[kind]
    return f"{'' if kind[0] == 's' else 'u'}int{_bits(kind)}_t"


_OPERATIONS = _operations()
_SPECIAL = {"%tid.x": "at->thread", "%ntid.x": "at->threads", "%ctaid.x": "at->block", "%nctaid.x": "at->blocks"}
_MEMORY = re.compile(r"(ld|st)(?:\.param|\.global|\.global\.nc)?(?:\.v([24]))?\.([busf])(8|16|32|64)")
_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<open>\{)|(?P<close>\})|(?P<label>[$\w]+):|(?P<statement>[@.\w][^;]*);",
)
_HEADER = re.compile(r"\s*\.version [\d.]+\s+\.target sm_\w+\s+\.address_size 64\s*")
_ENTRY = re.compile(r"\s*\.visible \.entry (\w+)\(([^)]*)\)\s*\.maxntid 256(?:, 1, 1)?\s*(?=\{)")
_PARAMETER = re.compile(r"\s*\.param (?:\.u32|\.u64(?: \.ptr \.align 1)?|\.align 8 \.b8) (\w+)(?:\[\d+\])?\s*")


def translate(ptx: str) -> str:
    """Returns C with a function for each kernel, and a table of their names and addresses."""
    # Comments become spaces, so that the lines of the PTX keep their numbers.
    text = re.sub(r"//[^\n]*", "", ptx)
    header = _HEADER.match(text)
    if not header:
        raise UntranslatedError(f"header: {text[:200]}")
    at, names, functions = header.end(), [], []
    while entry := _ENTRY.match(text, at):
        name, parameters = entry.groups()
        body = _Body(name, _parameters(parameters), text.count("\n", 0, entry.end()) + 1)
        at = body.read(text, entry.end())
        names.append(name)
        functions.append(body.c())
    if text[at:].strip():
        raise UntranslatedError(f"after the kernels: {text[at:].strip()[:200]}")
    table = "".join(f'    {{"{name}", {name}}},\n' for name in names)
    return "\n".join(['#include "ptx.h"\n', *functions, f"const Kernel kernels[] = {{\n{table}    {{0}},\n}};\n"])


def _parameters(text: str) -> dict[str, str]:
    """Returns the addresses of the parameters in C."""
    found = [_PARAMETER.fullmatch(parameter) for parameter in text.split(",")]
    if not all(found):
        raise UntranslatedError(f"parameters: {text}")
    return {match[1]: f"parameters[{index}]" for index, match in enumerate(found)}


class _Body:
    """Instructions of a kernel."""

    def __init__(self, name: str, parameters: dict[str, str], line: int) -> None:
        self._name = name
        self._parameters = parameters
        self._line = line
        self._registers: dict[str, tuple[str, int]] = {}  # C name and width, by PTX name
        self._declarations: list[str] = []
        self._lines: list[str] = []

    def read(self, text: str, at: int) -> int:
        """Reads the body that begins with a brace. Returns its end."""
        outer_scopes = []
        while token := _TOKEN.match(text, at):
            at = token.end()
            if token["label"]:
                self._lines.append(f"{_label(token['label'])}:;")
            elif token["statement"]:
                self._statement(" ".join(token["statement"].split()))
            elif token["open"]:
                outer_scopes.append(dict(self._registers))
            elif token["close"]:
                self._registers = outer_scopes.pop()
            self._line += token[0].count("\n")
            if not outer_scopes:
                return at
        raise UntranslatedError(f"line {self._line}: {text[at : at + 100]}")

    def c(self) -> str:
        header = f"static void {self._name}(const Place *at, const uint64_t *parameters) {{"
        return "\n".join([header, *self._declarations, *self._lines, "}\n"])

    def _statement(self, text: str) -> None:
        if match := re.fullmatch(r"\.reg \.(pred|[bf]\d+) (%?\w+)(?:<(\d+)>)?", text):
            kind, name, count = match.groups()
            for register in [name] if count is None else [f"{name}{index}" for index in range(int(count))]:
                self._declare(register, _bits(kind))
            return
        match = re.fullmatch(r"(?:@(!?)(%p\d+) )?([\w.]+)(?: (.*))?", text)
        if not match:
            raise self._error(text)
        negation, predicate, opcode, rest = match.groups()
        operands = re.findall(r"\s*(\{[^}]*\}|\[[^]]*\]|[^,]+)(?:,|$)", rest or "")
        condition = f"if ({negation}{self._bits_of(predicate, 8)}) " if predicate else ""
        self._lines.append(f"  {condition}{{ {self._instruction(opcode, operands)} }}")

    def _declare(self, register: str, width: int) -> None:
        # The same name may be declared again in another scope.
        name = f"{register.strip('%')}_{len(self._declarations)}"
        self._registers[register] = (name, width)
        # A register that is read before it is written is neither zero nor the value of another thread.
        self._declarations.append(f"  uint{width}_t {name} = (uint{width}_t)POISON;")

    def _instruction(self, opcode: str, operands: list[str]) -> str:
        if opcode in ("bra", "bra.uni") and len(operands) == 1:
            return f"goto {_label(operands[0])};"
        if opcode == "ret" and not operands:
            return "return;"
        if memory := _MEMORY.fullmatch(opcode):
            return self._memory(memory, operands)
        if opcode in ("mov.b32", "mov.b64") and any(operand.startswith("{") for operand in operands):
            return self._pack_or_unpack(_bits(opcode[4:]), *operands)
        operation = _OPERATIONS.get(opcode)
        if operation is None or len(operands) != 1 + len(operation.operands):
            raise self._error(f"{opcode} {', '.join(operands)}")
        # Only conversions accept registers that are wider than the type.
        is_exact = not opcode.startswith("cvt.")
        values = [
            self._value(operand, kind, is_exact) for operand, kind in zip(operands[1:], operation.operands, strict=True)
        ]
        expression = operation.c.format(**dict(zip("abcd", values, strict=False)))
        return self._assign(operands[0], operation.result, expression, is_exact)

    def _memory(self, match: re.Match[str], operands: list[str]) -> str:
        name, length, sign, bits = match.groups()
        count, width = int(length or 1), int(bits)
        address, values = reversed(operands) if name == "ld" else operands
        names = _elements(values) if length else [values]
        if len(names) != count:
            raise self._error(f"{match[0]} {', '.join(operands)}")
        # Floats are moved as bits.
        kind = ("b" if sign == "f" else sign) + bits
        steps = [f"uint64_t to = checked({self._address(address)}, {count * width // 8}, {self._line});"]
        for index, value in enumerate(names):
            place = f"*(Bits{width} *)(to + {index * width // 8})"
            if name == "ld":
                steps.append(self._assign(value, kind, f"({_c_type(kind)}){place}", is_exact=False))
            else:
                steps.append(f"{place} = {self._value(value, kind, is_exact=False)};")
        return " ".join(steps)

    def _address(self, operand: str) -> str:
        match = re.fullmatch(r"\[(%?\w+)(?:\+(-?\d+))?\]", operand)
        if not match:
            raise self._error(operand)
        base = self._parameters.get(match[1]) or self._bits_of(match[1], 64)
        return f"{base} + (uint64_t){match[2] or 0}"

    def _pack_or_unpack(self, bits: int, to: str, of: str) -> str:
        parts = _elements(to if to.startswith("{") else of)
        part = f"b{bits // len(parts)}"
        if to.startswith("{"):
            whole = self._bits_of(of, bits)
            steps = [self._assign(name, part, f"whole >> {index * _bits(part)}") for index, name in enumerate(parts)]
            return " ".join([f"uint{bits}_t whole = {whole};", *steps])
        shifted = [
            f"(uint{bits}_t){self._bits_of(name, _bits(part))} << {index * _bits(part)}"
            for index, name in enumerate(parts)
        ]
        return self._assign(to, f"b{bits}", " | ".join(shifted))

    def _value(self, operand: str, kind: str, is_exact: bool) -> str:
        """Returns an operand as a value of a type."""
        bits = self._bits_of(operand, _bits(kind), is_exact)
        return f"{_c_type(kind)}_of({bits})" if kind in ("f32", "f64") else f"({_c_type(kind)}){bits}"

    def _bits_of(self, operand: str, width: int, is_exact: bool = True) -> str:
        """Returns the bits of a register, a number, a parameter's address, or a property of the launch."""
        if operand in self._registers:
            name, own_width = self._registers[operand]
            if own_width == width or (own_width > width and not is_exact):
                return name
        if re.fullmatch(r"-?\d+", operand) and -(1 << (width - 1)) <= int(operand) < 1 << width:
            return f"UINT{width}_C({int(operand) % (1 << width)})"
        if re.fullmatch({32: r"0f[0-9A-F]{8}", 64: r"0d[0-9A-F]{16}"}.get(width, ""), operand):
            return f"UINT{width}_C(0x{operand[2:]})"
        if width == 64 and operand in self._parameters:
            return self._parameters[operand]
        if width == 32 and operand in _SPECIAL:
            return _SPECIAL[operand]
        raise self._error(f"operand {operand} of {width} bits")

    def _assign(self, register: str, kind: str, expression: str, is_exact: bool = True) -> str:
        name = self._bits_of(register, _bits(kind), is_exact)
        if register not in self._registers:
            raise self._error(f"result {register}")
        if kind in ("f32", "f64"):
            return f"{name} = bits_of_{_c_type(kind)}({expression});"
        # A wider register gets the sign or zeros.
        own_width = self._registers[register][1]
        return f"{name} = (uint{own_width}_t)({_c_type(kind)})({expression});"

    def _error(self, text: str) -> UntranslatedError:
        return UntranslatedError(f"{self._name}, line {self._line}: {text}")


def _label(name: str) -> str:
    return "L" + name.replace("$", "_")


def _elements(vector: str) -> list[str]:
    return [name.strip() for name in vector.strip("{}").split(",")]
