"""The forms in which people keep data, in the order in which they are tried; `recognised` chooses one."""
