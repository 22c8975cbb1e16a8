"""Names of the column that tells whether an item can be bought now."""

from __future__ import annotations

IN_STOCK = frozenset({"in_stock", "is_in_stock", "instock", "available", "is_available", "for_sale", "is_for_sale"})
OUT_OF_STOCK = frozenset({"out_of_stock", "is_out_of_stock", "sold_out", "discontinued", "is_discontinued"})
PIECES = frozenset({"stock", "stock_level", "stock_quantity", "inventory"})
"""Names of columns that are true of items in stock, true of others, and the number of pieces."""
AVAILABILITY = "availability"
"""The column of product feeds, whose words tell."""
STOCK_NAMES = IN_STOCK | OUT_OF_STOCK | PIECES | {AVAILABILITY}
