"""The first hour with LensKit, by its guide "Getting Started"."""

from __future__ import annotations

from typing import Any


def recommendations(events: Any) -> Any:
    from lenskit import recommend
    from lenskit.data import from_interactions_df
    from lenskit.knn import ItemKNNScorer
    from lenskit.pipeline import topn_pipeline

    data = from_interactions_df(events)
    pipeline = topn_pipeline(ItemKNNScorer(max_nbrs=100, feedback="implicit"))
    pipeline.train(data)
    return [recommend(pipeline, user, n=10) for user in ("1", "2", "3")]


def comparison(events: Any) -> Any:
    from lenskit.batch import recommend
    from lenskit.data import from_interactions_df
    from lenskit.knn import EASEScorer, ItemKNNScorer
    from lenskit.metrics import NDCG, RunAnalysis
    from lenskit.pipeline import topn_pipeline
    from lenskit.splitting import LastN, crossfold_users
    from scipy.stats import ttest_rel

    data = from_interactions_df(events)
    split = next(crossfold_users(data, 1, LastN(1, "timestamp")))
    models = {"knn": ItemKNNScorer(max_nbrs=100, feedback="implicit"), "ease": EASEScorer()}
    ndcg = {}
    for name, scorer in models.items():
        pipeline = topn_pipeline(scorer)
        pipeline.train(split.train)
        lists = recommend(pipeline, split.test.keys(), n=10)
        analysis = RunAnalysis()
        analysis.add_metric(NDCG(10))
        ndcg[name] = analysis.measure(lists, split.test).list_metrics()["NDCG@10"]
    return {name: each.mean() for name, each in ndcg.items()}, ttest_rel(ndcg["ease"], ndcg["knn"])


def endpoint(events: Any) -> Any:
    import json
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from lenskit import recommend
    from lenskit.data import from_interactions_df
    from lenskit.knn import ItemKNNScorer
    from lenskit.pipeline import topn_pipeline

    data = from_interactions_df(events)
    pipeline = topn_pipeline(ItemKNNScorer(max_nbrs=100, feedback="implicit"))
    pipeline.train(data)

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = recommend(pipeline, asked["user"], n=asked["k"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps([str(item) for item in found.ids()]).encode())

    return HTTPServer(("127.0.0.1", 0), Answer)


OWN_CODE = {"comparison": "the test", "endpoint": "the server"}
ASK = ("/", {"user": "1", "k": 10})
