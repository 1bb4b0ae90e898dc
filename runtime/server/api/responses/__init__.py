"""OpenAI's Responses API for texts and functions: items instead of messages, typed events, kept responses.

What a request becomes, a conversation for the chat template, and how it is generated is the same as for chats.
"""
