"""`fst completion`: prints a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import partial

from fst._core.dtype_names import CASTABLE
from fst.cli.arguments import expanded
from fst.cli.time import KEEP

# Values of options that also take others, such as "cuda:1".
_VALUES = {"--device": ("cpu", "cuda"), "--dtype": (*CASTABLE, KEEP)}
# Arguments that take names of tensors. The scripts ask for the names in the header of the first path.
_NAMES = {"name", "--names"}
# Shells expand candidates, so names with other characters are left out: a file must not choose what a shell runs.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,/+@%-]*")
_ASK = {
    "bash": '$(fst completion names "${COMP_WORDS[2]}" 2>/dev/null) ',
    "zsh": '$(fst completion names "${words[3]}" 2>/dev/null) ',
    "fish": "            fst completion names $tokens[3] 2>/dev/null\n",
}
_POSIX_CASE = '        PATTERN) candidates="WORDS" ;;'
# Script of each shell around its cases, and one case: a pattern of the words before the current one, and the words that
# may follow. Shells complete paths where none of the words fits.
_SCRIPTS = {
    "bash": (
        """_fst() {
    local candidates
    case "${COMP_WORDS[*]:1:COMP_CWORD-1} " in
CASES
    esac
    COMPREPLY=($(compgen -W "$candidates" -- "$2"))
    [[ $2 == -* ]] || COMPREPLY=(${COMPREPLY[@]/#-*/})
}
complete -o bashdefault -o default -F _fst fst""",
        _POSIX_CASE,
    ),
    "zsh": (
        """_fst() {
    local -a candidates
    case "${words[2,CURRENT-1]} " in
CASES
    esac
    candidates=(${=candidates})
    [[ $PREFIX == -* ]] || candidates=(${candidates:#-*})
    compadd -- $candidates
    _files
}
compdef _fst fst""",
        _POSIX_CASE,
    ),
    "fish": (
        """function __fst_candidates
    set -l tokens (commandline -opc)
    switch "$tokens[2..-1] "
CASES
    end
end
complete -c fst -a '(__fst_candidates)'""",
        "        case 'PATTERN'\n            string split -- ' ' 'WORDS'",
    ),
}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell",
        description="Prints a script that completes commands and options. Load it when a shell starts: add "
        '`eval "$(fst completion bash)"` to ~/.bashrc, `eval "$(fst completion zsh)"` to ~/.zshrc, after compinit, or '
        "`fst completion fish | source` to ~/.config/fish/config.fish.",
    )
    parser.add_argument("shell", choices=[*_SCRIPTS, "names"], help="a shell, or `names` for the names of a file")
    parser.add_argument("path", nargs="?", type=expanded, metavar="PATH", help="the file whose names are printed")
    parser.set_defaults(run=partial(_run, commands))


def words_of(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the long options of a parser, and the values of its positional arguments, such as subcommands."""
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    values = [value for action in parser._actions if not action.option_strings for value in action.choices or ()]
    return [*values, *options]


def _run(commands: argparse._SubParsersAction[argparse.ArgumentParser], arguments: argparse.Namespace) -> int:
    if (arguments.path is None) == (arguments.shell == "names"):
        raise ValueError("fst completion takes a shell, or `names` and a path")
    if arguments.path is not None:
        from fst._checkpoint.checkpoint import OpenCheckpoint

        print("\n".join(filter(_PLAIN.fullmatch, OpenCheckpoint(arguments.path).listed_names())))
        return 0
    script, case = _SCRIPTS[arguments.shell]
    cases = [found for name, parser in commands.choices.items() for found in _cases(parser, f"{name} ")]
    cases.append(("*", [*commands.choices, "--help", "--version"], False))
    # fish would expand a pattern without quotes to names of files, and others would match one in quotes literally.
    is_fish = arguments.shell == "fish"
    lines = []
    for pattern, words, has_names in cases:
        line = case.replace("PATTERN", pattern.replace(" ", " " if is_fish else r"\ ")).replace(
            "WORDS", " ".join(words)
        )
        if has_names:
            before = "            string split" if is_fish else 'candidates="'
            ask = _ASK[arguments.shell]
            line = line.replace(before, ask + before if is_fish else before + ask)
        lines.append(line)
    print(script.replace("CASES", "\n".join(lines)))
    return 0


def _cases(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, list[str], bool]]:
    """Yields patterns of the words before the current one, and the words that may follow. The first match counts.

    The last value of each tuple is whether names of tensors may follow, too.
    """
    has_names = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _cases(inner, f"{words}{name} ")
        elif action.option_strings:
            for option in action.option_strings:
                if option in _NAMES:
                    yield f"{words}*{option} ", [], True
                elif values := action.choices or _VALUES.get(option):
                    yield f"{words}*{option} ", list(values), False
        else:
            has_names |= action.dest in _NAMES
    if has_names:
        yield f"{words}?* ", words_of(parser), True
    yield f"{words}*", words_of(parser), False
