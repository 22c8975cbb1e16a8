"""The Dataset Feature Specification, and the tensors that its features become."""

from recspec.feature_spec.model import FILE_NAME, FOLD_IN, NO_FILES, SPLITS, FeatureSpec
from recspec.feature_spec.sections import CHUNK_TYPES, MOST_IDS, SIGNALS, Chunk, ChunkType, Feature, Role, json_schema
from recspec.feature_spec.signature import (
    EXPORT_FILE,
    FORMS,
    LOGIT,
    OUTPUTS,
    PROBABILITY,
    RANKING_OUTPUTS,
    Form,
    Level,
    Port,
    PortType,
    Signature,
    check_description,
    find_export_file,
    is_output,
    probability_of,
    signature_of,
)
