"""The commands and options of the command line. Importing it loads no torch, so that --help is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

from tokensteer.app.words import names
from tokensteer.tasks.common.settings import Settings, left

METHODS = ", ".join(names.METHODS)

RUN = f"""\
Run one method on a task and write a run folder.

  tokensteer run digits
  tokensteer run digits --method smc-grad --particles 16 --populations 8 --goal 7 --out out/seven
  tokensteer run mog --method smc-enumerated --particles 2000 --out out/mog
  tokensteer run digits --budget 30s
  tokensteer run digits --trigger every:20 --ramp clipped:5 --draws 4 --out out/rarely
  tokensteer run text --goal 0 --prompts prompts.txt --populations 4 --out out/blame
  tokensteer run text --contains plot music --without z --populations 1 --out out/words
  tokensteer run --config out/seven/config.json --seed 1 --out out/again

Methods: {METHODS}.
`tokensteer list methods` has a line about each."""

COMPARE = """\
Run several methods, sizes and seeds on a task, side by side in one run folder.

  tokensteer compare mog --particles 2000 --populations 10 --out out/mog
  tokensteer compare digits --methods smc-base smc-grad --particles 4 16 64 --seeds 0 1 2
  tokensteer compare digits --recipe ramps --particles 16
  tokensteer compare digits --methods auto smc-base fk-difference --budget 20s
  tokensteer compare digits --match-rows smc-grad --particles 4

Denoiser and reward rows stand beside every method: compare methods at equal rows as well as at equal N. Recipes vary
what a method is made of: ramps (the full reward after k tenths of the time, without and with remasking), draws (the
reward from 1 to 25 clean samples), steps (10 to 200 denoising steps), kl (from a quarter of the task's, or of --kl, to
four times as much), resampling (four schemes, each where the ESS is below a half, always, and five times in a run; and
none), traces (ESS and reward without resampling). The paper's ablation of ramps is

  tokensteer compare mnist --recipe ramps --kl 1 --particles 16 --populations 30"""

TRAIN = """\
Train the networks of a task, with a card that says how good they are.

  tokensteer train mog --out out/weights
  tokensteer train mnist --device cuda --minutes 5 --out out/weights
  tokensteer run mnist --weights out/weights
  tokensteer train mnist --proposal --goal 7 --device cuda --minutes 4 --out out/seven
  tokensteer run mnist --method smc-amot --goal 7 --kl 0.5 --weights out/seven
  tokensteer train digits --proposal --goal 7 --objective step-variance --baseline time --out out/as-in-the-paper
  tokensteer train dna --proposal --goal 0 --reward logit --device cuda --minutes 4 --out out/active

A training that was stopped goes on where it was if it is given the same folder and options."""

REPORT = """\
Write a run folder's report: one HTML page that needs nothing else.

  tokensteer report out/mog --open
  tokensteer report out/mog --figures"""

CHECK = """\
Hold your own denoiser, kernel, reward, Diffusion or Steering to the laws of tokensteer.testing.

  tokensteer check mymodel:steering
  tokensteer check rewards.py:toxicity --vocab 30523 --length 32 --mask 30522
  tokensteer check mymodel:kernel --vocab 5

What is given is an object, or a function without arguments that makes one. A function of x is taken for a reward, of
x and t for a denoiser. The first law that is broken is named, with the mend."""

DEMO = """\
Compare methods on mog, and on digits at equal network rows, with the shipped weights; then a report.

  tokensteer demo
  tokensteer demo --seed 1 --out out/another"""

DOCTOR = """\
Say what is installed: versions, devices, optional packages, data and weights.

  tokensteer doctor"""


LIST = """\
List the methods, tasks, rewards or recipes, with a line about each.

  tokensteer list
  tokensteer list methods"""

COMPLETION = """\
Print a script that completes commands, options and names in a shell.

  tokensteer completion bash >> ~/.bash_completion
  tokensteer completion zsh >> ~/.zshrc
  tokensteer completion fish > ~/.config/fish/completions/tokensteer.fish"""

*_FIRST, _LAST = names.TASKS
TASKS = f"{', '.join(_FIRST)} and {_LAST}"
Task = Annotated[Positional[str], arg(metavar="TASK", help=f"One of {TASKS}.")]
Flag = FlagCreatePairsOff[bool]
Json = Annotated[Flag, arg(help="Print one JSON object to standard output, and nothing else there.")]


@dataclass(frozen=True)
class Where:
    weights: Annotated[Path | None, left("those shipped", "FOLDER")] = None
    """A folder of weights that train made."""
    device: str = "cpu"
    """cpu or cuda."""
    memory: Annotated[str | None, left("what is free", "SIZE")] = None
    """What a network may take at once, such as 8GiB."""
    force: Flag = False
    """Replace the run that is in the folder."""
    resume: Flag = False
    """Go on with the unfinished run that is in the folder: its rows and units are kept, and the others are run."""
    workers: Annotated[int | None, left("1, or with --ray as many as fit", "INT")] = None
    """Processes that run units. Results do not depend on it. More than one need Ray."""
    ray: Annotated[str | None, left("none", "ADDRESS")] = None
    """Run units on a Ray cluster: auto for one that runs here, or its address."""
    gpus_per_worker: Annotated[float | None, left("1 with --device cuda", "FLOAT")] = None
    """GPUs that each worker has to itself; 0.5 lets two share one."""
    config: Annotated[Path | None, left("none", "FILE")] = None
    """Options from a TOML file, or from the config.json of a run; those of the command line come before them."""


Asked = Annotated[Settings, arg(name="")]
Here = Annotated[Where, arg(name="")]


@dataclass(frozen=True)
class Run:
    task: Task
    method: Annotated[
        str | None,
        left(
            "smc-grad; smc-cfg for cifar, smc-base for emoji; for text smc-amot where a proposal was learned, else "
            "smc-base; auto with --budget",
            "STR",
        ),
    ] = None
    """One of those above. auto chooses by pilots, within --budget."""
    budget: Annotated[str | None, left("30s for auto", "TIME")] = None
    """What auto may spend, pilots included: a time such as 30s or 5min, or a number of network rows."""
    particles: Annotated[
        int | None, left("16, 2 for text, 4 for cifar and emoji, or what --budget pays for", "INT")
    ] = None
    """Particles in each population."""
    populations: Annotated[int | None, left("8, 1 for text, cifar and emoji", "INT")] = None
    """Independent runs side by side, of each prompt if there are several; they give the standard errors."""
    seed: int = 0
    """Same seed, same samples."""
    keep_states: Flag = False
    """Store the particles of every step, for the player of the report; of the first two populations only."""
    islands: Annotated[int | None, left("1", "INT")] = None
    """Share the populations of a row out to so many units, each with its own seed, that workers can run at once; of
    each prompt if there are several."""
    split_prompts: Flag = False
    """Make each prompt a unit of its own, that workers can run at once. Otherwise prompts are batched together."""
    out: Annotated[Path | None, left("out/TASK-METHOD", "FOLDER")] = None
    """The run folder."""
    settings: Asked = field(default_factory=Settings)
    where: Here = field(default_factory=Where)
    json: Json = False


@dataclass(frozen=True)
class Compare:
    task: Task
    methods: Annotated[tuple[str, ...] | None, left("all that suit the task, or the recipe's", "STR ...")] = None
    """Methods by name."""
    particles: Annotated[tuple[int, ...] | None, left("16", "INT ...")] = None
    """Sizes of a population."""
    populations: Annotated[int | None, left("8, or 30 for traces", "INT")] = None
    """Independent runs side by side, of each prompt if there are several; they give the standard errors."""
    seeds: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (0,)
    """A row for each of them."""
    match_rows: Annotated[str | None, left("equal N", "METHOD")] = None
    """Give each method the particles that the network rows of this one, with --particles, pay for."""
    budget: Annotated[str | None, left("none: --particles", "TIME")] = None
    """Give each method the particles that it moves in this time, such as 30s. auto can be among the methods."""
    recipe: str = "methods"
    """What is varied: methods, ramps, draws, steps, kl, resampling or traces."""
    keep_states: Flag = False
    """Store the particles of every step, for the player of the report; of the first two populations of a row only."""
    islands: Annotated[int | None, left("1", "INT")] = None
    """Share the populations of a row out to so many units, each with its own seed, that workers can run at once; of
    each prompt if there are several."""
    split_prompts: Flag = False
    """Make each prompt a unit of its own, that workers can run at once. Otherwise prompts are batched together."""
    out: Annotated[Path | None, left("out/TASK-RECIPE", "FOLDER")] = None
    """The run folder."""
    settings: Asked = field(default_factory=Settings)
    where: Here = field(default_factory=Where)
    json: Json = False


@dataclass(frozen=True)
class Train:
    task: Task
    out: Annotated[Path | None, left("out/TASK-weights", "FOLDER")] = None
    """Where weights, cards and figures go."""
    device: str = "cpu"
    """cpu or cuda."""
    seed: int = 0
    """Same seed, same weights on the same machine."""
    minutes: Annotated[float | None, left("as long as the task's steps take", "FLOAT")] = None
    """Time for training, measuring not counted."""
    scale: float = 1.0
    """Without --minutes: this many times the task's steps."""
    proposal: Flag = False
    """Teach a proposal (and a twist, where they are learned together) to the shipped networks instead of training
    those."""
    twist: Flag = False
    """Teach a twist to the shipped proposal instead."""
    goal: Annotated[int | None, left("the task's own", "INT")] = None
    """With --proposal or --twist: what it is to draw, such as a digit."""
    reward: Annotated[str | None, left("the task's", "NAME")] = None
    """With --proposal or --twist: a reward of dna, text or emoji, each at its own kl."""
    kl: Annotated[float | None, left("that of the task's training, or the reward's", "FLOAT")] = None
    """With --proposal or --twist: the reward is divided by it. What was learned fits this kl best."""
    weights: Annotated[Path | None, left("those shipped", "FOLDER")] = None
    """With --proposal or --twist: the folder of the networks it is taught with."""
    objective: Annotated[str | None, left("the task's", "STR")] = None
    """With --proposal, what is minimised: step-variance (of the log-weight of single moves), balance (over stretches of
    paths, with a twist; detailed-balance for single moves, trajectory-balance for whole paths), path-variance (of the
    log-weight of whole paths) or likelihood (of samples of the target). With --twist: returns (the squared error of the
    log-weight still to come) or contrastive (states of the target are told from states of the model)."""
    baseline: Annotated[str | None, left("the task's", "STR")] = None
    """With --proposal, the F that step-variance subtracts: state (F(x_t, t), which lets the loss reach zero), time
    (F(t), a small network as in the paper) or per-step (F(t), a number for each step)."""
    force: Flag = False
    """Replace the weights that are in the folder."""
    json: Json = False


@dataclass(frozen=True)
class Report:
    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="What run or compare wrote.")]
    figures: Flag = False
    """Draw figures for a paper too, PNG files in FOLDER/figures; needs matplotlib."""
    open: Flag = False
    """Open the page in a browser."""
    json: Json = False


@dataclass(frozen=True)
class Check:
    target: Annotated[Positional[str], arg(metavar="MODULE:ATTRIBUTE", help="What to check; MODULE may be a file.")]
    vocab: Annotated[int | None, left("unknown", "INT")] = None
    """Tokens there are, the mask among them; for a denoiser, kernel or reward on its own."""
    length: Annotated[int | None, left("unknown", "INT")] = None
    """Sites of a sequence; for a denoiser or reward on its own."""
    mask: Annotated[int | None, left("the last token", "INT")] = None
    """The id of the mask; for a denoiser or reward on its own."""
    one_hots: Flag = False
    """Whether a denoiser or reward on its own must take one-hots too, with gradients."""
    seed: int = 0
    """Of the random sequences it is asked about."""
    json: Json = False


@dataclass(frozen=True)
class Demo:
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("out/demo")
    """The run folder, with the report in it."""
    seed: int = 0
    """Same seed, same numbers."""
    force: Flag = False
    """Replace the run that is in the folder."""
    json: Json = False


@dataclass(frozen=True)
class Doctor:
    json: Json = False


@dataclass(frozen=True)
class List:
    what: Annotated[Positional[str | None], arg(metavar="WHAT", help="methods, tasks, rewards or recipes.")] = None
    json: Json = False


@dataclass(frozen=True)
class Completion:
    shell: Annotated[Positional[str], arg(metavar="SHELL", help="bash, zsh or fish.")]
    json: Json = False


Command = Demo | Run | Compare | Report | Train | Check | Doctor | List | Completion
Outcome = dict[str, Any]
"""What a command prints with --json."""
COMMANDS: dict[str, tuple[type[Command], str]] = {
    "demo": (Demo, DEMO),
    "run": (Run, RUN),
    "compare": (Compare, COMPARE),
    "report": (Report, REPORT),
    "train": (Train, TRAIN),
    "check": (Check, CHECK),
    "doctor": (Doctor, DOCTOR),
    "list": (List, LIST),
    "completion": (Completion, COMPLETION),
}

HELP = f"""\
Steer discrete diffusion models with Sequential Monte Carlo.

usage: tokensteer COMMAND ...

{chr(10).join(f"  {name:<10} {about.splitlines()[0]}" for name, (_, about) in COMMANDS.items())}

Try
  tokensteer demo
  tokensteer run digits --goal 7 --out out/seven
  tokensteer compare mog --particles 500 --populations 4 --out out/mog
  tokensteer report out/mog

There are the tasks {TASKS}. `tokensteer COMMAND --help`, or
`tokensteer help COMMAND`, has the options, with more examples. With the
environment variable TOKENSTEER_TRACEBACK=1 errors show where they came from."""
