"""The names that the command line knows, with a line about each. Importing this module loads no torch, so that a
mistyped name is answered at once. Tests compare these tables with the objects that the names stand for."""

from __future__ import annotations

from tokensteer.app.words.methods import DESCRIBED

TASKS = {
    "mog": "two tokens of 64 states, a mixture of nine Gaussians; the exact target is known",
    "product": "two tokens of 64 states, a ring times a cross of stripes; the exact target is known",
    "digits": "handwritten digits of 8 x 8 binary pixels",
    "mnist": "handwritten digits of 28 x 28 binary pixels",
    "text": "short texts of 100 pieces of words, about anything; takes prompts and rewards of your own",
    "dna": "DNA of 200 letters, towards sites open or active in a cell type",
    "tfbind": "words of eight DNA letters, with a measured reward; the exact target is known",
    "tfbind-fitted": "the same with a model fitted to the words that some factor binds",
    "cifar": "colour images of 32 x 32 pixels of ten classes, with guidance as an exact target",
    "emoji": "drawings of 64 x 64 pixels from a caption, in six styles; takes prompts",
}
METHODS = {name: text.partition(".")[0] for name, text in DESCRIBED.items()}
"""Methods with the first sentence about each."""
REWARDS = {
    "mog": "r = -x²/100 - y², with the expectation in closed form",
    "product": "the log-density of the stripes",
    "digits": "log p(--goal | x) of a classifier",
    "mnist": "log p(--goal | x) of a classifier",
    "text": "log p(praise | x) of a classifier, or of blame with --goal 0; also --reward sentiment",
    "text --reward toxicity": "log p(toxic | x) of a classifier, or of polite with --goal 0",
    "text --reward FILE.py:FUNCTION": "a function of your own, from a list of texts to a number for each",
    "dna": "log p(open in the cell type --goal | x) of a classifier; --reward log-p is the same",
    "dna --reward logit": "log p - log(1 - p) of the same classifier",
    "tfbind": "the measured binding of the factor --goal",
    "tfbind-fitted": "the same",
    "cifar": "log p(class | image) of a classifier, for the class of the population",
    "cifar --reward compressibility": "minus the kilobytes of the decoded image, deflated as in a PNG",
    "emoji": "the cosine of image and prompt under a network; --reward alignment is the same",
    "emoji --reward compressibility": "minus the kilobytes of the decoded image, deflated as in a PNG",
    "emoji --reward mostly-blue": "how much is blue; or red, orange, yellow, green, purple, pink",
}
"""Rewards by the words of the command line that choose them."""
NAMED_REWARDS = {
    "text": ("sentiment", "toxicity"),
    "dna": ("log-p", "logit"),
    "cifar": ("class", "compressibility"),
    "emoji": (
        "alignment",
        "compressibility",
        *(f"mostly-{colour}" for colour in ("red", "orange", "yellow", "green", "blue", "purple", "pink")),
    ),
}
"""The names that --reward takes, for tasks with several rewards."""
RECIPES = {
    "methods": "all methods that suit the task",
    "ramps": "the full reward after k tenths of the time, without and with remasking",
    "draws": "the reward from 1 to 25 clean samples",
    "steps": "10 to 200 denoising steps",
    "kl": "from a quarter of the kl to four times as much",
    "resampling": "four schemes at three triggers each, and no resampling",
    "traces": "ESS and reward without resampling",
}
RAMPS = ("linear", "constant", "end", "exponential")
RAMPS_WITH_NUMBER = {"clipped": "clipped:3", "adaptive": "adaptive:0.9"}
"""Names that take a number after a colon, each with an example."""
TRIGGERS = ("always", "never", "observe")
TRIGGERS_WITH_NUMBER = {"ess": "ess:0.5", "every": "every:20"}
SCHEMES = ("systematic", "stratified", "residual", "multinomial", "ssp")
NOISES = ("fresh", "shared")
OBJECTIVES = ("step-variance", "balance", "detailed-balance", "trajectory-balance", "path-variance", "likelihood")
TWISTS = ("returns", "contrastive")
"""Objectives of a twist; those above are of a proposal."""
SHELLS = ("bash", "zsh", "fish")
BASELINES = ("state", "time", "per-step")
MOST_WORKERS = 10_000
LISTS = {"methods": METHODS, "tasks": TASKS, "rewards": REWARDS, "recipes": RECIPES}
"""What `tokensteer list` prints."""
