"""Small made-up datasets that several test files train on."""

from pathlib import Path

from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec


def interactions(folder: Path, **settings: object) -> FeatureSpec:
    """Who took what, in order, prepared with candidates in valid and test: 120 users, 60 items."""
    synthetic = DATASETS["synthetic"]
    sizes = {"kind": "interactions", "num_users": 120, "num_items": 60, "num_rows": 2500, "num_negatives": 20}
    synthetic.prepare(Path(), folder, synthetic.Settings(**{**sizes, **settings}))
    return FeatureSpec.load(folder)


def clicks(folder: Path, **settings: object) -> FeatureSpec:
    """Labelled rows with user, item, context, numerical and list features; the best possible AUC is known."""
    synthetic = DATASETS["synthetic"]
    sizes = {"kind": "clicks", "num_users": 100, "num_items": 50, "num_rows": 4000}
    synthetic.prepare(Path(), folder, synthetic.Settings(**{**sizes, **settings}))
    return FeatureSpec.load(folder)


OUTBRAIN_CARDINALITIES = {
    "document_id": 300_000, "document_id_promo": 100_000, "platform": 4, "source_id": 4_000, "geo_location": 2_500,
    "geo_location_country": 300, "geo_location_state": 2_000, "publisher_id": 1_000, "ad_id": 250_000,
    "advertiser_id": 2_500, "source_id_promo": 4_000, "publisher_id_promo": 1_000, "campaign_id": 5_000,
    "topic_id_list": 350, "entity_id_list": 10_000, "category_id_list": 100,
}  # fmt: skip
OUTBRAIN_WIDTHS = {
    **dict.fromkeys(OUTBRAIN_CARDINALITIES, 64),
    "document_id": 128, "document_id_promo": 128, "ad_id": 128, "campaign_id": 128, "platform": 19,
}  # fmt: skip
"""The published widths of the embeddings, 1235 numbers in all."""


def like_outbrain() -> FeatureSpec:
    """A specification of the published Outbrain features, without files: 13 ids, 3 lists, 13 numbers."""
    ids = {
        name: {"cardinality": cardinality, **({"length": 3, "padding": 0} if name.endswith("_list") else {})}
        for name, cardinality in OUTBRAIN_CARDINALITIES.items()
    }
    numbers: dict[str, dict[str, object]] = {f"number_{place}": {"dtype": "float32"} for place in range(13)}
    features = {**ids, **numbers}
    return FeatureSpec.from_dict(
        {
            "feature_spec": {**features, "label": {"dtype": "float32"}},
            "channel_spec": {"context": list(features), "label": ["label"]},
        }
    )
