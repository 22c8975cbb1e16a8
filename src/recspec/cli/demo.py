"""The demo: commands that are printed, and run by the very command line that a person would type them into."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import which

from recspec import api
from recspec.api import Place
from recspec.cli.console import argument, err, quoted_command, step
from recspec.cli.presenters import search_minutes
from recspec.cli.process import fresh_folder

MODELS = "popularity,item_knn,markov,ease,gf_cf,ials,two_tower,neumf"
"""Cheap models of every kind, and NeuMF; without `--models`, `auto` needs more than a demo's minute."""
SHOP = {
    "user": "customer",
    "item": "sku",
    "timestamp": "at",
    "event": "type",
    "target": "purchase",
    "event_weights": "{view: 1, cart: 3, purchase: 5}",
    "title": "title",
    "item_features": "[category, brand, price]",
    "user_features": "[country]",
}


@api.verb
def demo(
    *, run: Callable[[Sequence[str]], object], raw: Place | None = None, out: Place = "demo", minutes: float = 0.2
) -> None:
    """Show recspec at work on a made-up shop.

    It prepares events, picks the best of eight models, measures it beside baselines, and recommends. Every command that
    it prints can be copied.

    Args:
        run: A function that runs the words of a command.
        raw: MovieLens files to use instead of the shop: the zip or its folder.
        out: Folder to write.
        minutes: Minutes of the search for the best model.
    """
    from recspec.datasets import write_shop

    def show(*words: object) -> None:
        step(quoted_command(*words))
        run([argument(word) for word in words])

    started, folder = time.perf_counter(), Path(out)
    data, search = folder / "data", fresh_folder(folder, "search")
    best = search / "best"
    if raw is None:
        shop = folder / "shop"
        step(f"a made-up shop: views, carts and purchases, products with prices and stock, and customers, in {shop}")
        write_shop(shop)
        settings = SHOP | {"items": shop / "products.csv", "users": shop / "customers.csv"}
        assigned = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        show("prepare", "table", shop / "events.csv", data, "--force", *assigned)
    else:
        show("prepare", "movielens", raw, data, "--force")
    show("auto", data, search, "--minutes", minutes, "--models", MODELS)
    show("evaluate", best, data, "--baselines", "--protocol", "full")
    user = api.open(best).predictor.busiest_user()
    of_shop = () if raw is not None else ("--filter", "in_stock", "--columns", "price,brand")
    show("recommend", best, f"--user={user}", "-k", 5, "--explain", *of_shop)
    show("report", best)
    err.print(f"\ndone in {time.perf_counter() - started:.0f} s; all of it is in {folder}. What you can do now:")
    if which("recspec") is None and sys.prefix != sys.base_prefix:
        _offer("use the commands in this shell", f". {shlex.quote(str(Path(sys.prefix) / 'bin' / 'activate'))}")
    _offer("serve the model, with a page to try it at http://127.0.0.1:8000", quoted_command("serve", best))
    journal = f"sqlite:///{(folder / 'journal.db').absolute()}"
    _offer(
        "the same, and take events, which the next answer knows", quoted_command("serve", best, "--journal", journal)
    )
    longer = search_minutes(api.open_data(data))
    more = quoted_command("auto", data, fresh_folder(folder, "auto"), "--minutes", longer)
    _offer(f"try every suitable model, for {longer} minutes", more)


def _offer(what: str, command: str) -> None:
    err.print(f"  {what}:\n    {command}", soft_wrap=True)
