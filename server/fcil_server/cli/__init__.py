"""Commands of ``fcil-server``, their options and their text output."""
