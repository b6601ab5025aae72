from stock_count.taskset import StockCountTaskset

__all__ = ["StockCountTaskset"]
