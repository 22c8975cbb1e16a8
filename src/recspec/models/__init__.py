"""The models: batch -> logits. Adding one is a file here and a line below."""

from recspec.models.base import Model
from recspec.models.neumf import NeuMF

MODELS: dict[str, type[Model]] = {
    NeuMF.name: NeuMF,
}
