"""The Gregorian calendar."""

DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def is_leap(year: int) -> bool:
    """Whether a year has 366 days."""
    if year % 400 == 0:
        return True
    if year % 100 == 0:
        return False
    return year % 4 == 0


def days_in_month(year: int, month: int) -> int:
    """How many days a month has, from 1 for January."""
    if month < 1 or month > 12:
        raise ValueError(f"there is no month {month}")
    if month == 2 and is_leap(year):
        return 29
    return DAYS[month - 1]


def day_of_year(year: int, month: int, day: int) -> int:
    """The number of a day in its year, from 1."""
    total = day
    for earlier in range(1, month):
        total += days_in_month(year, earlier)
    return total


def next_day(year: int, month: int, day: int) -> tuple[int, int, int]:
    """The day after."""
    if day < days_in_month(year, month):
        return year, month, day + 1
    if month < 12:
        return year, month + 1, 1
    return year + 1, 1, 1


def weekday(year: int, month: int, day: int) -> int:
    """The day of the week, 0 for Monday. The first of January of the year 1 was one."""
    past = year - 1
    days = past * 365 + past // 4 - past // 100 + past // 400
    return (days + day_of_year(year, month, day) - 1) % 7


def working_days(year: int, month: int) -> int:
    """How many days of a month are not Saturday or Sunday."""
    count = 0
    for day in range(1, days_in_month(year, month) + 1):
        if weekday(year, month, day) < 5:
            count += 1
    return count
