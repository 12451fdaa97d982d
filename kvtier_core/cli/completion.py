"""`kvtier completion SHELL`: a script that completes this command line, made from its parser."""

from __future__ import annotations

import argparse
import functools

from kvtier_core.cli.output import FINE, Output

#: Lets zsh read completions written for bash.
_ZSH = "autoload -Uz bashcompinit && bashcompinit\n"
#: The first word is a command; then come its options and their choices, and files wherever nothing else is known.
_SCRIPT = """\
_kvtier() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} choices
    case "${{COMP_WORDS[1]}}" in
{cases}
    *) choices= ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then choices="{commands}"; fi
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
}}
complete -o default -F _kvtier kvtier
"""


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a shell completion script for this command",
        description='In ~/.bashrc: eval "$(kvtier completion bash)"; in ~/.zshrc the same with zsh.',
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(run=functools.partial(run, commands))


def run(commands: argparse._SubParsersAction, options: argparse.Namespace, output: Output) -> int:
    """The script for a shell."""
    words = {name: _words(parser) for name, parser in commands.choices.items()}
    cases = "\n".join(f'    {name}) choices="{" ".join(each)}" ;;' for name, each in words.items())
    script = _SCRIPT.format(cases=cases, commands=" ".join(words))
    output.value = (_ZSH if options.shell == "zsh" else "") + script
    output.say(output.value.rstrip("\n"))
    return FINE


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """The words that may follow a command's name, without those that only its user knows."""
    return [
        word
        for action in parser._actions  # argparse has no public way to them
        for word in (*action.option_strings, *(action.choices or ()))
        if word != "-h"
    ]
