"""Text to tokens and tokens to text: the tokenizer of a checkpoint's folder, streamed decoding, chat templates.

What ends a request, such as a stop string, is in `ingot.runtime.requests.request`.
"""
