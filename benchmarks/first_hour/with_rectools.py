"""The first hour with RecTools, by the `README.md` of its repository and its example notebooks."""

from __future__ import annotations

from typing import Any


def recommendations(events: Any) -> Any:
    from implicit.nearest_neighbours import CosineRecommender
    from rectools import Columns
    from rectools.dataset import Dataset
    from rectools.models import ImplicitItemKNNWrapperModel

    interactions = events.rename(columns={"timestamp": Columns.Datetime}).assign(weight=1)
    dataset = Dataset.construct(interactions)
    model = ImplicitItemKNNWrapperModel(CosineRecommender(K=100)).fit(dataset)
    return model.recommend(users=["1", "2", "3"], dataset=dataset, k=10, filter_viewed=True)


def comparison(events: Any) -> Any:
    from implicit.nearest_neighbours import CosineRecommender
    from rectools import Columns
    from rectools.dataset import Dataset
    from rectools.metrics import NDCG
    from rectools.model_selection import LastNSplitter
    from rectools.models import EASEModel, ImplicitItemKNNWrapperModel
    from scipy.stats import ttest_rel

    interactions = events.rename(columns={"timestamp": Columns.Datetime}).assign(weight=1)
    dataset = Dataset.construct(interactions)
    ((train, test, _),) = LastNSplitter(n=1).split(dataset.interactions)
    held_out, known = interactions.iloc[test], dataset.filter_interactions(train, keep_external_ids=True)
    models = {"knn": ImplicitItemKNNWrapperModel(CosineRecommender(K=100)), "ease": EASEModel()}
    ndcg = {}
    for name, model in models.items():
        model.fit(known)
        users = held_out[Columns.User].unique()
        lists = model.recommend(users=users, dataset=known, k=10, filter_viewed=True)
        ndcg[name] = NDCG(k=10).calc_per_user(lists, held_out)
    return {name: each.mean() for name, each in ndcg.items()}, ttest_rel(ndcg["ease"], ndcg["knn"])


def endpoint(events: Any) -> Any:
    import json
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from implicit.nearest_neighbours import CosineRecommender
    from rectools import Columns
    from rectools.dataset import Dataset
    from rectools.models import ImplicitItemKNNWrapperModel

    interactions = events.rename(columns={"timestamp": Columns.Datetime}).assign(weight=1)
    dataset = Dataset.construct(interactions)
    model = ImplicitItemKNNWrapperModel(CosineRecommender(K=100)).fit(dataset)

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = model.recommend(users=[asked["user"]], dataset=dataset, k=asked["k"], filter_viewed=True)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(found.to_json(orient="records").encode())

    return HTTPServer(("127.0.0.1", 0), Answer)


OWN_CODE = {"comparison": "the test", "endpoint": "the server"}
ASK = ("/", {"user": "1", "k": 10})
