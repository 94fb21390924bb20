"""`fst completion`: prints a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from fst.cli.time import DTYPES, KEEP

# Values of options that also take others, such as "cuda:1".
_VALUES = {"--device": ("cpu", "cuda"), "--dtype": (*DTYPES, KEEP)}
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
    parser.add_argument("shell", choices=list(_SCRIPTS))
    parser.set_defaults(run=partial(_run, commands))


def words_of(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the long options of a parser, and the values of its positional arguments, such as subcommands."""
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    values = [value for action in parser._actions if not action.option_strings for value in action.choices or ()]
    return [*values, *options]


def _run(commands: argparse._SubParsersAction[argparse.ArgumentParser], arguments: argparse.Namespace) -> int:
    script, case = _SCRIPTS[arguments.shell]
    cases = [found for name, parser in commands.choices.items() for found in _cases(parser, f"{name} ")]
    cases.append(("*", [*commands.choices, "--help", "--version"]))
    # fish would expand a pattern without quotes to names of files, and others would match one in quotes literally.
    space = " " if arguments.shell == "fish" else r"\ "
    lines = [
        case.replace("PATTERN", pattern.replace(" ", space)).replace("WORDS", " ".join(words))
        for pattern, words in cases
    ]
    print(script.replace("CASES", "\n".join(lines)))
    return 0


def _cases(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, list[str]]]:
    """Yields patterns of the words before the current one, and the words that may follow. The first match counts."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _cases(inner, f"{words}{name} ")
        else:
            for option in action.option_strings:
                if values := action.choices or _VALUES.get(option):
                    yield f"{words}*{option} ", list(values)
    yield f"{words}*", words_of(parser)
