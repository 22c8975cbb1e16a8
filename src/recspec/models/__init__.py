"""The models: batch -> logits. Adding one is a file here and a line below, or an entry point of another package."""

import inspect
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from recspec.base.errors import SettingsError, unknown
from recspec.models.base import (
    TRAINING_SPACE,
    LossNeeds,
    Model,
    Shapes,
    Traits,
    at_once,
    counts_of,
    on_meta_device,
    require_libraries,
)
from recspec.models.bert4rec import Bert4Rec
from recspec.models.dcnv2 import DcnV2
from recspec.models.dien import Dien
from recspec.models.din import Din, SequenceModel
from recspec.models.dlrm import Dlrm
from recspec.models.ease import Ease
from recspec.models.facts import DataFacts, IdFacts, PreparedNegatives, Proposals, Task
from recspec.models.finalnet import FinalNet
from recspec.models.gf_cf import GfCf
from recspec.models.ials import Ials
from recspec.models.interactions import Ids, Interactions, Scores, UserEvents
from recspec.models.item_knn import ItemKnn
from recspec.models.item_model import FittedItemModel, FittedModel, ItemModel, KnownItemsModel, TrainedItemModel
from recspec.models.known_items import KnownEvents, SeenIds, StoredLists, problems_of_lists
from recspec.models.lightgbm import LightGbm, LightGbmSettings
from recspec.models.logistic_regression import LogisticRegression
from recspec.models.markov import Markov
from recspec.models.mult_vae import MultVae
from recspec.models.multitask import (
    MultiTask,
    label_views,
    labels_of,
    logits_of_labels,
    probabilities_of_labels,
)
from recspec.models.neumf import NeuMF
from recspec.models.popularity import Popularity
from recspec.models.row_model import FittedRowModel
from recspec.models.sasrec import SasRec
from recspec.models.sim import Sim
from recspec.models.trees import Trees
from recspec.models.two_tower import TwoTower
from recspec.models.wide_deep import INDICATOR_MOST_IDS, Deep, Wide, WideDeep, WideDeepSettings

__all__ = [
    "INDICATOR_MOST_IDS", "MODELS", "TRAINING_SPACE", "DataFacts", "Deep", "FittedItemModel", "FittedModel",
    "FittedRowModel", "IdFacts", "Ids", "Interactions", "ItemModel", "KnownEvents", "KnownItemsModel", "LightGbm",
    "LightGbmSettings", "LogisticRegression", "LossNeeds", "Model", "MultiTask", "PreparedNegatives", "Proposals",
    "Scores", "SeenIds", "SequenceModel", "Shapes", "StoredLists", "Task", "TrainedItemModel", "Traits", "Trees",
    "UserEvents", "Wide", "WideDeep", "WideDeepSettings", "all_models", "at_once", "counts_of", "find_model",
    "known_models", "label_views", "labels_of", "logits_of_labels", "on_meta_device", "probabilities_of_labels",
    "problems_of_lists", "require_libraries",
]  # fmt: skip


MODELS: dict[str, type[Model]] = {
    NeuMF.name: NeuMF,
    WideDeep.name: WideDeep,
    Dlrm.name: Dlrm,
    DcnV2.name: DcnV2,
    FinalNet.name: FinalNet,
    MultiTask.name: MultiTask,
    Din.name: Din,
    Dien.name: Dien,
    Sim.name: Sim,
    TwoTower.name: TwoTower,
    Popularity.name: Popularity,
    ItemKnn.name: ItemKnn,
    Ease.name: Ease,
    Ials.name: Ials,
    LogisticRegression.name: LogisticRegression,
    LightGbm.name: LightGbm,
    MultVae.name: MultVae,
    SasRec.name: SasRec,
    Bert4Rec.name: Bert4Rec,
    Markov.name: Markov,
    GfCf.name: GfCf,
}
"""The built-in models by name."""

PLUGINS = "recspec.models"
"""Group of entry points by which installed packages add models; each is named as its model."""
RESERVED = ("blend", "lambdarank")
"""Names that a plug-in may not take, besides those of `MODELS`."""


def find_model(name: str) -> type[Model]:
    """The class of a built-in model, or of one that an installed package adds.

    Raises:
        SettingsError: for an unknown name, or a plug-in that can't be used.
    """
    if name in MODELS:
        return MODELS[name]
    plugins = [each for each in entry_points(group=PLUGINS) if each.name == name]
    if not plugins or name in RESERVED:
        raise SettingsError(unknown("model", name, known_models()))
    return _load(plugins)


def known_models() -> list[str]:
    """Names of all models; no plug-in is loaded."""
    return [*MODELS, *sorted({each.name for each in entry_points(group=PLUGINS)} - {*MODELS, *RESERVED})]


def all_models() -> dict[str, type[Model]]:
    """Built-in models and those of installed packages. Raises `SettingsError` for a plug-in that can't be used."""
    models = dict(MODELS)
    for plugin in entry_points(group=PLUGINS):
        if plugin.name in (*MODELS, *RESERVED):
            raise SettingsError(f"{_told(plugin)}: recspec itself has a model of this name; rename the entry point")
        models[plugin.name] = find_model(plugin.name)
    return models


def _load(plugins: Sequence[EntryPoint]) -> type[Model]:
    """The class that the entry points of one name give."""
    first, *others = plugins
    if others:
        raise SettingsError(f"{_told(first)}: {_told(others[0])} has the same name; uninstall one of the packages")
    try:
        model = first.load()
    except Exception as error:
        how = f"`python -c 'import {first.module}'` shows where; repair or uninstall the package"
        raise SettingsError(f"{_told(first)}: {type(error).__name__}: {error}; {how}") from error
    if not (isinstance(model, type) and issubclass(model, Model)) or inspect.isabstract(model):
        raise SettingsError(f"{_told(first)}: {first.value} is {model!r}; expected a complete subclass of Model")
    if model.name != first.name:
        raise SettingsError(f"{_told(first)}: the class's name is '{model.name}'; give both the same name")
    return model


def _told(plugin: EntryPoint) -> str:
    package = "an unnamed package" if plugin.dist is None else f"the package {plugin.dist.name} {plugin.dist.version}"
    return f"model '{plugin.name}' of {package}"
