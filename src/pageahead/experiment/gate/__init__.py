"""From evidence to GO, NO-GO or INCOMPLETE: pure arithmetic on records, on any machine."""
