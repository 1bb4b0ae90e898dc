"""What a model wrote, read back as a message: content, reasoning and tool calls, by a declarative template.

Templates are data: of a checkpoint, or those in `formats`. Nothing here generates; the server reads streams with it.
"""

from ingot.runtime.replies.call_stream import ToolCall
from ingot.runtime.replies.formats import FORMATS, ReplyFormat, format_of
from ingot.runtime.replies.parser import ReplyDelta, ReplyParser
from ingot.runtime.replies.template import ReplyTemplate

__all__ = ["FORMATS", "ReplyDelta", "ReplyFormat", "ReplyParser", "ReplyTemplate", "ToolCall", "format_of"]
