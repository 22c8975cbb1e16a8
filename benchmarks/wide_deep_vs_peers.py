"""Training speed of Wide & Deep beside DeepCTR-Torch's and torch-rechub's: same rows, layers, optimizer, in turns.

    python benchmarks/wide_deep_vs_peers.py [--settings published small] [--threads 1] [--rounds 3] [--quick]

Two settings over the features published for Outbrain (13 ids, 3 lists of up to 3 ids, 13 numbers; made-up rows, held
in memory). `published`: widths that sum to 1235 and an MLP of 5 x 1024, where the products of matrices decide.
`small`: width 16 and an MLP of 512-256-128, where everything around them does.

The clock runs over whole training steps after the first batches: choosing rows at random, forward, backward,
optimizer. Each peer trains by its own `fit` with its own loader, which takes rows one at a time. `helped` is the same
`fit` with what a user could add from outside: a loader that takes a batch's rows at once, and torch's setting that
sends products through oneDNN; so it compares the models and not the loaders. torch-rechub takes one width for all
features, so it is in `small` only.

`of matrix rate` is the arithmetic of all matrix products (as recspec's step does them) over what plain matrix products
reach, as recspec's process measured it in the same round: the machine's own limit for everybody.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from _side_by_side import (
    Comparison,
    Contender,
    Found,
    Measures,
    Pace,
    compared,
    fit_deepctr,
    fit_rechub,
    found_of_peer,
    parser,
    start,
    time_recspec,
    without_batch_normalisation,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "published": {
        "hidden": [1024] * 5,
        "dropout": 0.1,
        "embedding_dim": 64,
        "embedding_dims": {
            "document_id": 128,
            "document_id_promo": 128,
            "ad_id": 128,
            "campaign_id": 128,
            "platform": 19,
        },
    },
    "small": {"hidden": [512, 256, 128], "dropout": 0.1, "embedding_dim": 16, "embedding_dims": {}},
}
"""`published` are the sizes published for Outbrain."""

OPTIMIZER = {"learning_rate": 0.00012, "rho": 0.9, "eps": 1e-7}
"""RMSprop for all weights of everybody. With the published rho of .5 the mean square of a row that is not in use halves
at every step, and a hundred steps later a dense update counts in denormal numbers, which are many times slower."""

DIFFERENCES = (
    "peers compute in fp32 as torch does by default, helped ones through oneDNN, recspec as its `precision` says",
    "peers update all rows of all tables at every step, recspec those in use where that pays (`sparse_gradients`)",
    "torch-rechub's MLP is measured without its batch normalisation; its wide part has one more weight a feature",
    "DeepCTR-Torch and torch-rechub start embeddings with deviation 1e-4, recspec Glorot-normal; no side has L2",
    "recspec's command line tells glibc to keep freed memory; peers run with the allocator as it is",
)


def compare(arguments: argparse.Namespace, scratch: Path) -> Found:
    """All measurements of a run."""
    from recspec.bench.speed import clicks_like_outbrain

    spec = clicks_like_outbrain(scratch / "data")
    rows = write_matrix(spec, scratch / "matrix")
    chosen = ["published"] if arguments.quick else arguments.settings
    return {
        "what": "Wide & Deep training, samples/s over whole steps",
        "sizes": {setting: SETTINGS[setting] for setting in chosen},
        "optimizer": {"optimizer": "rmsprop", **OPTIMIZER},
        "data": "made up in Outbrain's shape",
        "rows": rows,
        "settings": {
            setting: compared(_comparison(setting, str(spec.folder), str(scratch / "matrix"), arguments), arguments)
            for setting in chosen
        },
        "differences": DIFFERENCES,
    }


def _comparison(setting: str, data: str, matrix: str, arguments: argparse.Namespace) -> Comparison:
    ours = {"data": data, "setting": setting, "precision": arguments.precision}
    contenders = {"recspec": Contender("recspec", ours)}
    left_out = {}
    for name, who in (("DeepCTR-Torch", "deepctr"), ("torch-rechub", "rechub")):
        if who == "rechub" and SETTINGS[setting]["embedding_dims"]:
            left_out[name] = "it takes one width for all features"
            continue
        theirs = {"data": matrix, "setting": setting}
        if not arguments.quick:
            contenders[name] = Contender(who, {**theirs, "helped": False})
        contenders[f"{name}, helped"] = Contender(who, {**theirs, "helped": True})
    title = f"Wide & Deep, {setting}"
    return Comparison(Path(__file__), "wide_deep", title, contenders, same_products=True, left_out=left_out)


def write_matrix(spec: Any, folder: Path) -> int:
    """The training split as one float32 matrix, its labels and the columns' meaning; gives its rows.

    DeepCTR-Torch turns everything into such a matrix itself; ids up to 2^24 stay exact in it.
    """
    import numpy as np

    from recspec.data.storage import Ragged, open_split

    folder.mkdir()
    names = spec.inputs()
    parts: dict[str, list[Any]] = {name: [] for name in (*names, spec.label)}
    for columns in open_split(spec, "train", tuple(parts)).batches():
        for name, column in columns.items():
            dense = (
                column.pad(spec.features[name].length) if isinstance(column, Ragged) else np.asarray(column)[:, None]
            )
            parts[name].append(dense.astype(np.float32))
    matrix = np.concatenate([np.concatenate(parts[name]) for name in names], axis=1)
    np.save(folder / "rows.npy", matrix)
    np.save(folder / "labels.npy", np.concatenate(parts[spec.label])[:, 0])
    features = [
        {
            "name": name,
            "ids": spec.num_ids(name) if spec.features[name].is_categorical else None,
            "length": spec.features[name].length,
        }
        for name in names
    ]
    (folder / "features.json").write_text(json.dumps(features), encoding="utf-8")
    return len(matrix)


def width(feature: str, setting: str) -> int:
    """Numbers of a feature's embedding."""
    sizes = SETTINGS[setting]
    return int(sizes["embedding_dims"].get(feature, sizes["embedding_dim"]))


# --- in a process of its own -----------------------------------------------------------------------------------------


def measure_recspec(data: str, *, pace: Pace, setting: str, precision: str) -> Found:
    """This project, by the steps of its own training run."""
    train = {"optimizer": "rmsprop", **OPTIMIZER, "precision": precision}
    return time_recspec("wide_deep", data, pace, train=train, sizes=SETTINGS[setting])


def measure_deepctr(data: str, *, pace: Pace, setting: str, helped: bool) -> Found:
    """DeepCTR-Torch's WDL, by its own `fit`."""
    import torch
    from deepctr_torch.models import WDL  # type: ignore[import-not-found]

    columns, features, labels = read_matrix(data)
    held = deepctr_features(features, lambda name: width(name, setting))
    sizes = SETTINGS[setting]
    model = WDL(
        held,
        held,
        dnn_hidden_units=sizes["hidden"],
        dnn_dropout=sizes["dropout"],
        l2_reg_linear=0,
        l2_reg_embedding=0,
        l2_reg_dnn=0,
    )
    optimizer = _rmsprop(torch.optim.RMSprop, model.parameters())
    return found_of_peer(fit_deepctr(model, optimizer, columns, labels, pace, helped=helped), model)


def deepctr_features(features: list[dict[str, Any]], width: Callable[[str], int]) -> list[Any]:
    """The features of a matrix as DeepCTR-Torch is told of them, each id's embedding of its `width`."""
    from deepctr_torch.inputs import (  # type: ignore[import-not-found]
        DenseFeat,
        SparseFeat,
        VarLenSparseFeat,
    )

    held: list[Any] = []
    for feature in features:
        name, ids, length = feature["name"], feature["ids"], feature["length"]
        if ids is None:
            held.append(DenseFeat(name, 1))
            continue
        sparse = SparseFeat(name, ids, embedding_dim=width(name))
        held.append(sparse if length is None else VarLenSparseFeat(sparse, maxlen=length, combiner="sum"))
    return held


def measure_rechub(data: str, *, pace: Pace, setting: str, helped: bool) -> Found:
    """torch-rechub's WideDeep, by its own trainer; the linear part is given embeddings of width 1."""
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from torch_rechub.basic.features import (  # type: ignore[import-not-found]
        DenseFeature,
        SequenceFeature,
        SparseFeature,
    )
    from torch_rechub.models.ranking import WideDeep  # type: ignore[import-not-found]
    from torch_rechub.utils.data import DataGenerator  # type: ignore[import-not-found]

    columns, features, labels = read_matrix(data)
    wide, deep = [], []
    for feature in features:
        name, ids, length = feature["name"], feature["ids"], feature["length"]
        if ids is None:
            deep.append(DenseFeature(name))
            wide.append(DenseFeature(name))
            continue
        # A feature's name is its table's, so the linear part's needs another one, over the same ids.
        columns[f"wide {name}"] = columns[name] = columns[name].astype("int32")
        for part, known_as, dim in ((deep, name, width(name, setting)), (wide, f"wide {name}", 1)):
            if length is None:
                part.append(SparseFeature(known_as, ids, embed_dim=dim))
            else:
                part.append(SequenceFeature(known_as, ids, embed_dim=dim, pooling="sum", padding_idx=0))
    columns = {name: column if column.shape[1] > 1 else column[:, 0] for name, column in columns.items()}
    sizes = SETTINGS[setting]
    model = WideDeep(wide, deep, {"dims": sizes["hidden"], "dropout": sizes["dropout"], "activation": "relu"})
    without_batch_normalisation(model)

    def optimizer(parameters: Any) -> Any:
        return _rmsprop(torch.optim.RMSprop, parameters)

    _, clock = fit_rechub(model, optimizer, DataGenerator(columns, labels).dataset, pace, helped=helped)
    return found_of_peer(clock, model)


MEASURES: Measures = {
    "recspec": measure_recspec,
    "deepctr": measure_deepctr,
    "rechub": measure_rechub,
}


def read_matrix(folder: str) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """A feature's columns (N, 1) or (N, length) by its name, what the features are, and the labels (N,)."""
    import numpy as np

    features = json.loads((Path(folder) / "features.json").read_text(encoding="utf-8"))
    matrix = np.load(Path(folder) / "rows.npy")
    starts = np.cumsum([0, *(feature["length"] or 1 for feature in features)]).tolist()
    columns = {
        feature["name"]: matrix[:, first:last]
        for feature, (first, last) in zip(features, pairwise(starts), strict=True)
    }
    return columns, features, np.load(Path(folder) / "labels.npy")


def _rmsprop(kind: Any, parameters: Any) -> Any:
    return kind(parameters, lr=OPTIMIZER["learning_rate"], alpha=OPTIMIZER["rho"], eps=OPTIMIZER["eps"])


def options() -> argparse.ArgumentParser:
    """What the command line takes."""
    options = parser(__doc__, __file__, batch_size=4096)
    options.add_argument("--settings", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    return options


if __name__ == "__main__":
    start(options(), MEASURES, compare)
