"""The endpoints: the fields of requests and answers in the forms of OpenAI's API, and the operator's endpoints.

Each turns a body into calls of a served model, and what the model returns into an answer.
"""
