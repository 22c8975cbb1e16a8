"""Names of the columns and splits of a prepared dataset."""

USER, ITEM, TIMESTAMP = "user_id", "item_id", "timestamp"
LABEL, GROUP, SERIES = "label", "group", "series"
SPLIT = "split"
"""Column with the split of a row: one of `SPLITS`."""
SPLITS = ("train", "valid", "test")
HISTORY, NEGATIVE_HISTORY, GAP = "history", "negative_history", "history_gap"
