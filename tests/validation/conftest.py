from support.fixtures import one_thread, tiny_run

__all__ = ["one_thread", "tiny_run"]
