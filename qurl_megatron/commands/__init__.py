"""The functions of the `qurl` commands; `qurl_megatron/cli.py` lists them."""
