"""The numbers in the READMEs come from here."""
