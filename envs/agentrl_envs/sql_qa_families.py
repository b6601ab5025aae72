"""The kinds of database that sql-qa has: tables, rows, and questions with their queries.

In scripts and queries ``$word`` stands for a table or column, whose name is one of several. In questions and queries
``{word}`` stands for a value that is drawn. A query that has two rows
or none is drawn again: of ties there is no answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Rows = Mapping[str, Sequence[tuple[int | str, ...]]]
Values = Mapping[str, int | str]

_NAMES = (
    *("Ada", "Ali", "Amy", "Ana", "Ben", "Bob", "Cal", "Dan", "Dee", "Eli", "Eva", "Fay", "Gil", "Gus", "Hal", "Ian"),
    *("Ida", "Ivy", "Jay", "Jim", "Joy", "Kai", "Kim", "Lee", "Leo", "Lia", "Liv", "Lou", "Mae", "Max", "Mia", "Ned"),
    *("Nia", "Ola", "Pam", "Pat", "Pia", "Ray", "Rex", "Rob", "Ron", "Roy", "Sam", "Sky", "Sue", "Tad", "Ted", "Tim"),
    *("Tom", "Una", "Uma", "Val", "Van", "Vic", "Wes", "Yan", "Zoe", "Zia"),
)
_CITIES = ("Bonn", "Cork", "Graz", "Kiel", "Linz", "Lyon", "Nice", "Oslo", "Pisa", "Riga")
_ITEMS = ("bag", "bed", "bike", "book", "bowl", "chair", "clock", "coat", "desk", "drum", "hat", "kite", "lamp", "map")
_COURSES = (
    "art",
    "biology",
    "chess",
    "dance",
    "drama",
    "film",
    "history",
    "law",
    "logic",
    "music",
    "physics",
    "poetry",
)
_GENRES = ("crime", "essay", "fable", "novel", "poem", "satire")


@dataclass(frozen=True)
class _SqlFamily:
    """One kind of database.

    Attributes:
        words: table or column -> what it may be called.
        rows: draws the rows of each table.
        values: draws what a question is about, out of the rows.
        questions: each a question and the query that answers it.
    """

    script: str
    words: Mapping[str, tuple[str, ...]]
    rows: Callable[[random.Random], Rows]
    values: Callable[[random.Random, Rows], Values]
    questions: tuple[tuple[str, str], ...]


def _numbered(rows: Sequence[tuple[int | str, ...]]) -> list[tuple[int | str, ...]]:
    return [(number, *row) for number, row in enumerate(rows, 1)]


def _shop(rng: random.Random) -> Rows:
    people = rng.sample(_NAMES, 24)
    return {
        "customers": _numbered([(name, rng.choice(_CITIES), rng.randint(18, 80)) for name in people]),
        "items": _numbered([(name, rng.randint(2, 400)) for name in rng.sample(_ITEMS, 10)]),
        "orders": _numbered([(rng.randint(1, 24), rng.randint(1, 10), rng.randint(1, 9)) for _ in range(150)]),
    }


def _school(rng: random.Random) -> Rows:
    people = rng.sample(_NAMES, 30)
    pairs = rng.sample([(s, c) for s in range(1, 31) for c in range(1, 9)], 140)
    return {
        "students": _numbered([(name, rng.choice(_CITIES), rng.randint(1985, 2008)) for name in people]),
        "courses": _numbered([(name, rng.randint(10, 90)) for name in rng.sample(_COURSES, 8)]),
        "grades": [(s, c, rng.randint(1, 100)) for s, c in pairs],
    }


def _library(rng: random.Random) -> Rows:
    authors = rng.sample(_NAMES, 16)
    titles = rng.sample([f"The {a.capitalize()} of {c}" for a in _ITEMS for c in _CITIES], 50)
    return {
        "authors": _numbered([(name, rng.choice(_CITIES), rng.randint(1800, 1990)) for name in authors]),
        "books": _numbered([(t, rng.randint(1, 16), rng.choice(_GENRES), rng.randint(40, 900)) for t in titles]),
        "loans": _numbered([(rng.randint(1, 50), rng.randint(1, 60)) for _ in range(160)]),
    }


_SHOP = _SqlFamily(
    script="CREATE TABLE $customers ($customer_id INTEGER PRIMARY KEY, $name TEXT, $city TEXT, $age INTEGER);\n"
    "CREATE TABLE $items ($item_id INTEGER PRIMARY KEY, $item TEXT, $price INTEGER);\n"
    "CREATE TABLE $orders ($order_id INTEGER PRIMARY KEY, $customer_id INTEGER, $item_id INTEGER, $pieces INTEGER);",
    words={
        "customers": ("customers", "clients", "buyers"),
        "customer_id": ("customer_id", "cid", "who_id"),
        "name": ("name", "called"),
        "city": ("city", "town", "home"),
        "age": ("age", "years"),
        "items": ("items", "products", "goods"),
        "item_id": ("item_id", "pid", "what_id"),
        "item": ("item", "product", "label"),
        "price": ("price", "cost", "euros"),
        "orders": ("orders", "sales", "purchases"),
        "order_id": ("order_id", "oid", "number"),
        "pieces": ("pieces", "quantity", "amount"),
    },
    rows=_shop,
    values=lambda rng, rows: {
        "who": rng.choice(rows["customers"])[1],
        "city": rng.choice(_CITIES),
        "item": rng.choice(rows["items"])[1],
        "age": rng.randint(25, 70),
        "n": rng.randint(10, 25),
    },
    questions=(
        (
            "How much has {who} spent in all?",
            "SELECT sum($pieces * $price) FROM $orders JOIN $items USING ($item_id) JOIN $customers USING "
            "($customer_id) WHERE $name = '{who}'",
        ),
        (
            "How much have customers from {city} spent on {item}s?",
            "SELECT sum($pieces * $price) FROM $orders JOIN $items USING ($item_id) JOIN $customers USING "
            "($customer_id) WHERE $city = '{city}' AND $item = '{item}'",
        ),
        (
            "Which customer bought the most {item}s?",
            "SELECT $name FROM (SELECT $name, sum($pieces) AS n FROM $orders JOIN $items USING ($item_id) JOIN "
            "$customers USING ($customer_id) WHERE $item = '{item}' GROUP BY $customer_id) WHERE n = (SELECT "
            "max(n) FROM (SELECT sum($pieces) AS n FROM $orders JOIN $items USING ($item_id) WHERE $item = '{item}' "
            "GROUP BY $customer_id))",
        ),
        (
            "How much have customers over {age} years spent in all?",
            "SELECT sum($pieces * $price) FROM $orders JOIN $items USING ($item_id) JOIN $customers USING "
            "($customer_id) WHERE $age > {age}",
        ),
        (
            "Count the orders of customers who each ordered over {n} pieces in all, and are not from {city}.",
            "SELECT sum(k) FROM (SELECT count(*) AS k FROM $orders JOIN $customers USING ($customer_id) WHERE "
            "$city <> '{city}' GROUP BY $customer_id HAVING sum($pieces) > {n})",
        ),
    ),
)
_SCHOOL = _SqlFamily(
    script="CREATE TABLE $students ($student_id INTEGER PRIMARY KEY, $name TEXT, $city TEXT, $born INTEGER);\n"
    "CREATE TABLE $courses ($course_id INTEGER PRIMARY KEY, $course TEXT, $hours INTEGER);\n"
    "CREATE TABLE $grades ($student_id INTEGER, $course_id INTEGER, $points INTEGER);",
    words={
        "students": ("students", "pupils", "learners"),
        "student_id": ("student_id", "sid", "who_id"),
        "name": ("name", "called"),
        "city": ("city", "town", "home"),
        "born": ("born", "birth_year"),
        "courses": ("courses", "subjects", "classes"),
        "course_id": ("course_id", "cid", "what_id"),
        "course": ("course", "subject", "title"),
        "hours": ("hours", "length"),
        "grades": ("grades", "results", "marks"),
        "points": ("points", "score", "grade"),
    },
    rows=_school,
    values=lambda rng, rows: {
        "who": rng.choice(rows["students"])[1],
        "city": rng.choice(_CITIES),
        "course": rng.choice(rows["courses"])[1],
        "born": rng.randint(1988, 2004),
        "hours": rng.randint(20, 60),
        "n": rng.randint(2, 4),
    },
    questions=(
        (
            "How many points has {who} in all courses together?",
            "SELECT sum($points) FROM $grades JOIN $students USING ($student_id) WHERE $name = '{who}'",
        ),
        (
            "Who has the most points in {course}?",
            "SELECT $name FROM $grades JOIN $students USING ($student_id) JOIN $courses USING ($course_id) WHERE "
            "$course = '{course}' AND $points = (SELECT max($points) FROM $grades JOIN $courses USING ($course_id) "
            "WHERE $course = '{course}')",
        ),
        (
            "How many hours of courses do students from {city} take in all?",
            "SELECT sum($hours) FROM $grades JOIN $students USING ($student_id) JOIN $courses USING ($course_id) "
            "WHERE $city = '{city}'",
        ),
        (
            "How many points have students born after {born} in courses of over {hours} hours, in all?",
            "SELECT sum($points) FROM $grades JOIN $students USING ($student_id) JOIN $courses USING ($course_id) "
            "WHERE $born > {born} AND $hours > {hours}",
        ),
        (
            "Of the students with over {n} courses, add up the points they have in {course}.",
            "SELECT sum($points) FROM $grades JOIN $courses USING ($course_id) WHERE $course = '{course}' AND "
            "$student_id IN (SELECT $student_id FROM $grades GROUP BY $student_id HAVING count(*) > {n})",
        ),
    ),
)
_LIBRARY = _SqlFamily(
    script="CREATE TABLE $authors ($author_id INTEGER PRIMARY KEY, $name TEXT, $city TEXT, $born INTEGER);\n"
    "CREATE TABLE $books ($book_id INTEGER PRIMARY KEY, $title TEXT, $author_id INTEGER, $genre TEXT, $pages INTEGER);"
    "\nCREATE TABLE $loans ($loan_id INTEGER PRIMARY KEY, $book_id INTEGER, $days INTEGER);",
    words={
        "authors": ("authors", "writers", "poets"),
        "author_id": ("author_id", "aid", "who_id"),
        "name": ("name", "called"),
        "city": ("city", "town", "home"),
        "born": ("born", "birth_year"),
        "books": ("books", "volumes", "works"),
        "book_id": ("book_id", "bid", "what_id"),
        "title": ("title", "label"),
        "genre": ("genre", "kind", "sort"),
        "pages": ("pages", "length"),
        "loans": ("loans", "lendings", "borrowed"),
        "loan_id": ("loan_id", "lid", "number"),
        "days": ("days", "duration"),
    },
    rows=_library,
    values=lambda rng, rows: {
        "who": rng.choice(rows["authors"])[1],
        "title": rng.choice(rows["books"])[1],
        "genre": rng.choice(_GENRES),
        "city": rng.choice(_CITIES),
        "born": rng.randint(1820, 1970),
        "n": rng.randint(2, 4),
    },
    questions=(
        (
            "How many pages did {who} write in all?",
            "SELECT sum($pages) FROM $books JOIN $authors USING ($author_id) WHERE $name = '{who}'",
        ),
        (
            "For how many days were books by {who} on loan in all?",
            "SELECT sum($days) FROM $loans JOIN $books USING ($book_id) JOIN $authors USING ($author_id) WHERE "
            "$name = '{who}'",
        ),
        (
            "Who wrote the longest {genre}?",
            "SELECT $name FROM $books JOIN $authors USING ($author_id) WHERE $genre = '{genre}' AND $pages = "
            "(SELECT max($pages) FROM $books WHERE $genre = '{genre}')",
        ),
        (
            "How many pages do the {genre} books that were lent over {n} times have in all?",
            "SELECT sum($pages) FROM $books WHERE $genre = '{genre}' AND $book_id IN (SELECT $book_id FROM $loans "
            "GROUP BY $book_id HAVING count(*) > {n})",
        ),
        (
            "For how many days were books by authors born after {born} and not from {city} on loan in all?",
            "SELECT sum($days) FROM $loans JOIN $books USING ($book_id) JOIN $authors USING ($author_id) WHERE "
            "$born > {born} AND $city <> '{city}'",
        ),
    ),
)
FAMILIES: Mapping[str, _SqlFamily] = {"shop": _SHOP, "school": _SCHOOL, "library": _LIBRARY}
