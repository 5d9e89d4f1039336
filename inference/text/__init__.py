"""Text around tokens: chat templates, messages, the detokenizer, streaming."""
