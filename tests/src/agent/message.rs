//! The messages between clients and servers. They can have any length, and a part that is lost,
//! repeated or changed is detected.
//!
//! A question is a line that may begin with `+N `, which requests an answer of N bytes. An answer
//! has the host's name, the client's address, the original destination if the connection was
//! redirected, and filler up to its length.

use std::net::SocketAddr;

/// No power of two divides this length, so the loss of a part with the size of a packet is
/// detected.
const FILLER: &[u8] = b"abcdefghijklmnopqrstuvw";

/// What a host sees of a client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// The client's address.
    pub(super) client: SocketAddr,
    /// The destination before the connection was redirected. None if it was not.
    pub(super) original: Option<SocketAddr>,
}

/// Returns a line of `size` bytes that requests an answer of `answer` bytes.
pub(super) fn question(size: usize, answer: usize) -> Vec<u8> {
    let head = if answer == 0 { String::new() } else { format!("+{answer} ") };
    filled(head.into_bytes(), size)
}

/// Returns the answer of a host to a client's question, as a line. The answer to a damaged question
/// says so, and does not parse as an answer.
pub(super) fn answer(host: &str, seen: Seen, question: &[u8]) -> Vec<u8> {
    let Seen { client, original } = seen;
    let original = original.map_or_else(String::new, |original| format!(">{original}"));
    match requested_size(question) {
        Some(size) => filled(format!("{host} {client}{original} ").into_bytes(), size),
        None => format!("{host}: the question of {} bytes is damaged\n", question.len()).into_bytes(),
    }
}

/// Returns the host's name and what it saw. None if the answer is damaged.
pub(super) fn parse_answer(answer: &[u8]) -> Option<(String, Seen)> {
    let mut parts = answer.splitn(3, |byte| *byte == b' ');
    let host = str::from_utf8(parts.next()?).ok()?.to_owned();
    let addresses = str::from_utf8(parts.next()?).ok()?;
    let (client, original) = match addresses.split_once('>') {
        Some((client, original)) => (client, Some(original.parse().ok()?)),
        None => (addresses, None),
    };
    let seen = Seen { client: client.parse().ok()?, original };
    is_filler(parts.next()?).then_some((host, seen))
}

/// Returns the requested size of the answer. None if the question is damaged.
fn requested_size(question: &[u8]) -> Option<usize> {
    let Some(rest) = question.strip_prefix(b"+") else {
        return is_filler(question).then_some(0);
    };
    let end = rest.iter().position(|byte| *byte == b' ')?;
    let (size, filler) = rest.split_at_checked(end)?;
    is_filler(filler.get(1..)?).then(|| str::from_utf8(size).ok()?.parse().ok()).flatten()
}

/// Appends filler up to `size` bytes. The last byte ends the line.
fn filled(mut head: Vec<u8>, size: usize) -> Vec<u8> {
    let missing = size.saturating_sub(head.len() + 1);
    head.extend(FILLER.repeat(missing / FILLER.len() + 1).into_iter().take(missing));
    head.push(b'\n');
    head
}

fn is_filler(text: &[u8]) -> bool {
    let Some(filler) = text.strip_suffix(b"\n") else { return false };
    filler.chunks(FILLER.len()).all(|chunk| FILLER.starts_with(chunk))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: &str = "192.0.2.1:40000";

    fn answer_to(question: &[u8]) -> Vec<u8> {
        answer("a1", Seen { client: CLIENT.parse().unwrap(), original: None }, question)
    }

    #[test]
    fn questions_and_answers_have_the_requested_size() {
        for size in [10, 1400, 1_000_000] {
            let question = question(size, 2 * size);
            assert_eq!(question.len(), size);
            assert_eq!(answer_to(&question).len(), (2 * size).max("a1 192.0.2.1:40000 \n".len()));
        }
        assert_eq!(question(1, 0), b"\n");
    }

    #[test]
    fn an_answer_names_the_host_the_client_and_the_original_destination() {
        for original in [None, Some("192.0.2.9:80"), Some("[2001:db8::9]:80")] {
            let original = original.map(|address| address.parse().unwrap());
            let seen = Seen { client: CLIENT.parse().unwrap(), original };
            let parsed = parse_answer(&answer("a1", seen, &question(5, 60)));
            assert_eq!(parsed, Some(("a1".to_owned(), seen)));
        }
    }

    #[test]
    fn damage_is_detected_in_both_directions() {
        let whole = question(3000, 3000);
        for damage in
            [|bytes: &mut Vec<u8>| drop(bytes.drain(1000..2448)), |bytes: &mut Vec<u8>| bytes[1500] ^= 1]
        {
            let mut question = whole.clone();
            damage(&mut question);
            assert_eq!(parse_answer(&answer_to(&question)), None);
            let mut answer = answer_to(&whole);
            damage(&mut answer);
            assert_eq!(parse_answer(&answer), None);
        }
    }
}
