"""The model as an IR: graph builder, decoder, rotary embedding, importer."""
