"""The first hour with RecBole, by its documentation's pages "Quick Start" and "Case Study"."""

from __future__ import annotations

from typing import Any


def recommendations(events: Any) -> Any:
    from pathlib import Path

    from recbole.quick_start import load_data_and_model, run_recbole
    from recbole.utils.case_study import full_sort_topk

    Path("dataset/events").mkdir(parents=True)
    header = ["user_id:token", "item_id:token", "timestamp:float"]
    events.to_csv("dataset/events/events.inter", sep="\t", index=False, header=header)
    settings = {"data_path": "dataset", "load_col": {"inter": ["user_id", "item_id", "timestamp"]}}
    run_recbole(model="ItemKNN", dataset="events", config_dict=settings)
    (file,) = Path("saved").glob("ItemKNN-*.pth")
    config, model, dataset, _, _, test = load_data_and_model(str(file))
    users = dataset.token2id(dataset.uid_field, ["1", "2", "3"])
    _, items = full_sort_topk(users, model, test, k=10, device=config["device"])
    return dataset.id2token(dataset.iid_field, items.cpu())


def comparison(events: Any) -> Any:
    from pathlib import Path

    import numpy as np
    from recbole.quick_start import load_data_and_model, run_recbole
    from recbole.utils.case_study import full_sort_topk
    from scipy.stats import ttest_rel

    Path("dataset/events").mkdir(parents=True)
    header = ["user_id:token", "item_id:token", "timestamp:float"]
    events.to_csv("dataset/events/events.inter", sep="\t", index=False, header=header)
    settings = {
        "data_path": "dataset",
        "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
        "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full"},
    }
    ndcg = {}
    for name in ("ItemKNN", "EASE"):
        run_recbole(model=name, dataset="events", config_dict=settings)
        (file,) = Path("saved").glob(f"{name}-*.pth")
        config, model, _, _, _, test = load_data_and_model(str(file))
        held_out = test.dataset.inter_feat
        users, wanted = held_out["user_id"].numpy(), held_out["item_id"].numpy()
        _, items = full_sort_topk(users, model, test, k=10, device=config["device"])
        hits = items.cpu().numpy() == wanted[:, None]
        ndcg[name] = (hits / np.log2(np.arange(2, 12))).sum(axis=1)
    return {name: each.mean() for name, each in ndcg.items()}, ttest_rel(ndcg["EASE"], ndcg["ItemKNN"])


def endpoint(events: Any) -> Any:
    import json
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from pathlib import Path

    from recbole.quick_start import load_data_and_model, run_recbole
    from recbole.utils.case_study import full_sort_topk

    Path("dataset/events").mkdir(parents=True)
    header = ["user_id:token", "item_id:token", "timestamp:float"]
    events.to_csv("dataset/events/events.inter", sep="\t", index=False, header=header)
    settings = {"data_path": "dataset", "load_col": {"inter": ["user_id", "item_id", "timestamp"]}}
    run_recbole(model="ItemKNN", dataset="events", config_dict=settings)
    (file,) = Path("saved").glob("ItemKNN-*.pth")
    config, model, dataset, _, _, test = load_data_and_model(str(file))

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            users = dataset.token2id(dataset.uid_field, [asked["user"]])
            _, items = full_sort_topk(users, model, test, k=asked["k"], device=config["device"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(dataset.id2token(dataset.iid_field, items.cpu())[0].tolist()).encode())

    return HTTPServer(("127.0.0.1", 0), Answer)


OWN_CODE = {"comparison": "the metric of each user and the test", "endpoint": "the server"}
ASK = ("/", {"user": "1", "k": 10})
