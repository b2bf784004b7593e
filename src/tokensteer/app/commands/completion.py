"""`tokensteer completion`: a script that completes commands, options and names in a shell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from tokensteer.app.options import COMMANDS, Completion, Outcome, Where
from tokensteer.app.words import names
from tokensteer.tasks.common.settings import Settings

NESTED = {"settings": Settings, "where": Where}
"""Fields whose own fields are options."""
FIRST: dict[str, Iterable[str]] = {
    **dict.fromkeys(("run", "compare", "train"), names.TASKS),
    "list": names.LISTS,
    "completion": names.SHELLS,
    "help": COMMANDS,
}
"""The names that may follow a command."""
VALUES: dict[str, Iterable[str]] = {
    "method": names.METHODS,
    "methods": names.METHODS,
    "match-rows": names.METHODS,
    "recipe": names.RECIPES,
    "ramp": [*names.RAMPS, *names.RAMPS_WITH_NUMBER.values()],
    "trigger": [*names.TRIGGERS, *names.TRIGGERS_WITH_NUMBER.values()],
    "resample": names.SCHEMES,
    "noise": names.NOISES,
    "objective": names.OBJECTIVES + names.TWISTS,
    "baseline": names.BASELINES,
    "device": ("cpu", "cuda"),
}
"""The values of options that take names; files are completed for the others."""
BASH = """\
_tokensteer() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} names=
  if [ "$COMP_CWORD" -eq 1 ]; then
    names="{commands}"
  elif [[ $word == --* ]]; then
    case ${{COMP_WORDS[1]}} in
{options}
    esac
  else
    case $before in
{values}
    esac
  fi
  COMPREPLY=($(compgen -W "$names" -- "$word"))
}}
complete -o default -F _tokensteer tokensteer
"""
ZSH = """\
(( $+functions[compdef] )) || { autoload -U +X compinit && compinit -i }
autoload -U +X bashcompinit && bashcompinit
"""
"""zsh reads the script of bash, once its own completion is on, which a plain .zshrc does not do."""


def main(command: Completion, words: str) -> Outcome:
    script = fish() if command.shell == "fish" else (ZSH if command.shell == "zsh" else "") + bash()
    print(script, end="")
    return {"script": script}


def options_of(kind: type) -> dict[str, bool]:
    """The options of a command by name, without those that are given by position, and whether each takes a value."""
    found: dict[str, bool] = {}
    for field in fields(kind):
        nested = NESTED.get(field.name)
        if nested is not None:
            found |= options_of(nested)
        elif "Positional" not in str(field.type) and field.type != "Task":
            found[field.name.replace("_", "-")] = field.type not in ("Flag", "Json")
    return found


def bash() -> str:
    options = {name: " ".join(f"--{option}" for option in options_of(kind)) for name, (kind, _) in COMMANDS.items()}
    values = FIRST | {f"--{name}": known for name, known in VALUES.items()}
    return BASH.format(
        commands=" ".join([*COMMANDS, "help"]),
        options="\n".join(f'      {name}) names="{known} --help";;' for name, known in options.items()),
        values="\n".join(f'      {name}) names="{" ".join(known)}";;' for name, known in values.items()),
    )


def fish() -> str:
    lines = ["complete -c tokensteer -n __fish_use_subcommand -f -a 'help'"]
    for name, (kind, about) in COMMANDS.items():
        line = about.splitlines()[0].replace("'", "\\'")
        lines.append(f"complete -c tokensteer -n __fish_use_subcommand -f -a {name} -d '{line}'")
        here = f"complete -c tokensteer -n '__fish_seen_subcommand_from {name}'"
        if name in FIRST:
            lines.append(f"{here} -f -a '{' '.join(FIRST[name])}'")
        for option, valued in options_of(kind).items():
            known = f" -x -a '{' '.join(VALUES[option])}'" if option in VALUES else " -r -F" if valued else ""
            lines.append(f"{here} -l {option}{known}")
    return "\n".join(lines) + "\n"
