"""Description of an unexpected error for logs: no log quotes a request or an answer."""


def where(error: BaseException) -> str:
    """Kind and place of an error, without its message, which may quote a text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" in {trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}" if trace else ""
    return f"{type(error).__name__}{place}"
