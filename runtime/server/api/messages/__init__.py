"""Anthropic's Messages API: `POST /v1/messages` and the count of its tokens. What it generates is a chat's.

Chats in OpenAI's form, and what both forms have in common, are in the folder above.
"""
