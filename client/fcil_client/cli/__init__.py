"""Commands of ``fcil-client``, their options and their text output."""
