"""Phalanx plans, runs and checks the training of transformers over tensor, pipeline and data axes.

From a run file to a run:

    run = phalanx.load(Path("run.toml"))                                # what to train, and on what
    found = phalanx.search(run.model, run.job, run.cluster, run.layout)  # legal layouts, the best first
    found.plans[0].write(Path("plan.json"))
    phalanx.start(Path("plan.json"), phalanx.RunDir(Path("runs/first")))  # one process per rank, here

    what there is       ModelSpec, ClusterSpec, JobSpec, OptimizerSpec, CheckpointSpec; load reads them
    what is decided     Layout, Coord; Plan, Prediction; search, predict
    what follows        groups, rank_buffers (Buffer), schedule (Schedule), traffic (Message)
    what is run         start, RunDir; verify holds a plan against one process
    your own module     ModulePlan; prepare, Trainer, TokenDataset, Blocks; plan_for, verify_module, module_weights;
                        phalanx.nn (docs/own-models.md)
    errors              PhalanxError, and below it InputError (with its Problems), CheckFailed, RunError

Each name is loaded when it is first asked for, so that importing the package costs nothing; only those of the row "your
own module" load torch. Type checkers read them in __init__.pyi.
"""

__version__ = "0.1.0"

_HOMES = {
    "phalanx.errors": ("CheckFailed", "InputError", "PhalanxError", "Problem", "RunError"),
    "phalanx.launch.local": ("start",),
    "phalanx.own.blocks": ("Blocks",),
    "phalanx.own.plan_for": ("plan_for",),
    "phalanx.own.prepare": ("prepare",),
    "phalanx.own.text": ("TokenDataset",),
    "phalanx.own.trainer": ("Trainer",),
    "phalanx.own.whole": ("module_weights",),
    "phalanx.plan.groups": ("groups",),
    "phalanx.plan.layout": ("Coord", "Layout"),
    "phalanx.plan.module": ("ModulePlan",),
    "phalanx.plan.plan": ("Plan", "Prediction"),
    "phalanx.plan.schedule": ("Schedule", "schedule"),
    "phalanx.plan.shards": ("Buffer", "rank_buffers"),
    "phalanx.plan.stage_traffic": ("Message",),
    "phalanx.plan.traffic": ("traffic",),
    "phalanx.planner.search": ("predict", "search"),
    "phalanx.rundir": ("RunDir",),
    "phalanx.spec.cluster": ("ClusterSpec",),
    "phalanx.spec.job": ("CheckpointSpec", "JobSpec", "OptimizerSpec"),
    "phalanx.spec.load": ("load",),
    "phalanx.spec.model": ("ModelSpec",),
    "phalanx.studies.verify": ("verify",),
    "phalanx.studies.verify_module": ("verify_module",),
}

__all__ = sorted(["__version__", *(name for names in _HOMES.values() for name in names)])


def __getattr__(name: str) -> object:
    from importlib import import_module  # here, so that the command has as little as can be to load before it begins

    if name == "nn":
        return import_module("phalanx.nn")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'phalanx' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
