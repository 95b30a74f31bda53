"""The public names for type checkers; at run time they are loaded when they are first asked for."""

from phalanx import nn as nn
from phalanx.errors import CheckFailed as CheckFailed
from phalanx.errors import InputError as InputError
from phalanx.errors import PhalanxError as PhalanxError
from phalanx.errors import Problem as Problem
from phalanx.errors import RunError as RunError
from phalanx.launch.local import start as start
from phalanx.own.blocks import Blocks as Blocks
from phalanx.own.plan_for import plan_for as plan_for
from phalanx.own.prepare import prepare as prepare
from phalanx.own.text import TokenDataset as TokenDataset
from phalanx.own.trainer import Trainer as Trainer
from phalanx.own.whole import module_weights as module_weights
from phalanx.plan.groups import groups as groups
from phalanx.plan.layout import Coord as Coord
from phalanx.plan.layout import Layout as Layout
from phalanx.plan.module import ModulePlan as ModulePlan
from phalanx.plan.plan import Plan as Plan
from phalanx.plan.plan import Prediction as Prediction
from phalanx.plan.schedule import Schedule as Schedule
from phalanx.plan.schedule import schedule as schedule
from phalanx.plan.shards import Buffer as Buffer
from phalanx.plan.shards import rank_buffers as rank_buffers
from phalanx.plan.stage_traffic import Message as Message
from phalanx.plan.traffic import traffic as traffic
from phalanx.planner.search import predict as predict
from phalanx.planner.search import search as search
from phalanx.rundir import RunDir as RunDir
from phalanx.spec.cluster import ClusterSpec as ClusterSpec
from phalanx.spec.job import CheckpointSpec as CheckpointSpec
from phalanx.spec.job import JobSpec as JobSpec
from phalanx.spec.job import OptimizerSpec as OptimizerSpec
from phalanx.spec.load import load as load
from phalanx.spec.model import ModelSpec as ModelSpec
from phalanx.studies.verify import verify as verify
from phalanx.studies.verify_module import verify_module as verify_module

__version__: str
