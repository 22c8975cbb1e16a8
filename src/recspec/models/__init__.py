"""The models: batch -> logits. Adding one is a file here and a line below."""

from recspec.models.base import TRAINING_SPACE, Model, Shapes, counts_of, require_libraries
from recspec.models.dcnv2 import DcnV2
from recspec.models.dien import Dien
from recspec.models.din import Din, SequenceModel
from recspec.models.dlrm import Dlrm
from recspec.models.ease import Ease
from recspec.models.facts import DataFacts, IdFacts, PreparedNegatives, Proposals, Task
from recspec.models.fitted import FittedItemModel, FittedModel, KnownItemsModel
from recspec.models.gf_cf import GfCf
from recspec.models.ials import Ials
from recspec.models.interactions import Ids, Interactions, Scores, UserEvents
from recspec.models.item_knn import ItemKnn
from recspec.models.item_model import ItemModel, TrainedItemModel
from recspec.models.known_items import KnownEvents, problems_of_lists
from recspec.models.logistic_regression import LogisticRegression
from recspec.models.markov import Markov
from recspec.models.mult_vae import MultVae
from recspec.models.neumf import NeuMF
from recspec.models.popularity import Popularity
from recspec.models.sasrec import SasRec
from recspec.models.sim import Sim
from recspec.models.two_tower import TwoTower
from recspec.models.wide_deep import INDICATOR_MOST_IDS, Deep, Wide, WideDeep, WideDeepSettings

__all__ = [
    "INDICATOR_MOST_IDS", "MODELS", "TRAINING_SPACE", "DataFacts", "Deep", "FittedItemModel", "FittedModel",
    "IdFacts", "Ids", "Interactions", "ItemModel", "KnownEvents", "KnownItemsModel", "LogisticRegression", "Model",
    "PreparedNegatives", "Proposals", "Scores", "SequenceModel", "Shapes", "Task", "TrainedItemModel", "UserEvents",
    "Wide", "WideDeep", "WideDeepSettings", "counts_of", "problems_of_lists", "require_libraries",
]  # fmt: skip


MODELS: dict[str, type[Model]] = {
    NeuMF.name: NeuMF,
    WideDeep.name: WideDeep,
    Dlrm.name: Dlrm,
    DcnV2.name: DcnV2,
    Din.name: Din,
    Dien.name: Dien,
    Sim.name: Sim,
    TwoTower.name: TwoTower,
    Popularity.name: Popularity,
    ItemKnn.name: ItemKnn,
    Ease.name: Ease,
    Ials.name: Ials,
    LogisticRegression.name: LogisticRegression,
    MultVae.name: MultVae,
    SasRec.name: SasRec,
    Markov.name: Markov,
    GfCf.name: GfCf,
}
