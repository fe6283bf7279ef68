"""The converters of `dstrain convert`, a file for each kind of data; a wheel has them in dstrain/shipped/convert/."""
