//! Values as Go's flag package reads them.

/// Reads the words of Go's `strconv.ParseBool`.
pub(super) fn bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// Reads a whole number as Go's `strconv.ParseInt` does in base 0, which pflag uses: `0x1f`, `0o17`
/// or `017`, `0b11`, and `_` between the digits of those and of `1_000`.
pub(super) fn integer(text: &str) -> Option<i64> {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let (radix, digits) = match unsigned.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &unsigned[2..]),
        [b'0', b'o' | b'O', ..] => (8, &unsigned[2..]),
        [b'0', b'b' | b'B', ..] => (2, &unsigned[2..]),
        [b'0', _, ..] => (8, &unsigned[1..]),
        _ => (10, unsigned),
    };
    // An underscore may follow the base prefix, too.
    let first = if radix == 10 { digits } else { digits.strip_prefix('_').unwrap_or(digits) };
    let are_digits =
        first.split('_').all(|group| !group.is_empty() && group.chars().all(|digit| digit.is_digit(radix)));
    let sign = if text.starts_with('-') { "-" } else { "" };
    are_digits.then(|| i64::from_str_radix(&format!("{sign}{}", first.replace('_', "")), radix).ok())?
}
