"""Numbers that selection and its kernels share."""

FILLER = -1  # an index where a row and head keep fewer tokens than another
BOUND = 4  # scores reach a 1/BOUND of the largest number; what outranks every score lies above
