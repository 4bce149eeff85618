//! What clients and servers send each other: of any length, and such that a piece that is lost, repeated or changed shows.
//!
//! A question is a line that may begin with `+N `, which asks for N bytes; an answer has the host's name, the client's
//! address and what fills it up.

use std::net::SocketAddr;

/// A length no power of two divides, so that a piece of any packet's size that is lost shows.
const FILLER: &[u8] = b"abcdefghijklmnopqrstuvw";

/// A line of `size` bytes that asks for an answer of `answer` bytes.
pub(super) fn question(size: usize, answer: usize) -> Vec<u8> {
    let head = if answer == 0 { String::new() } else { format!("+{answer} ") };
    filled(head.into_bytes(), size)
}

/// The answer of a host to a question of a client, a line too. One to a damaged question says so, and is none.
pub(super) fn answer(host: &str, client: SocketAddr, question: &[u8]) -> Vec<u8> {
    match asked_for(question) {
        Some(size) => filled(format!("{host} {client} ").into_bytes(), size),
        None => format!("{host}: of {} bytes some are not as they were sent\n", question.len()).into_bytes(),
    }
}

/// The host's name and the client's address in an answer; none if it is damaged.
pub(super) fn read_answer(answer: &[u8]) -> Option<(String, SocketAddr)> {
    let mut parts = answer.splitn(3, |byte| *byte == b' ');
    let host = str::from_utf8(parts.next()?).ok()?.to_owned();
    let client = str::from_utf8(parts.next()?).ok()?.parse().ok()?;
    is_filler(parts.next()?).then_some((host, client))
}

/// The size of the answer; none if the question is damaged.
fn asked_for(question: &[u8]) -> Option<usize> {
    let Some(rest) = question.strip_prefix(b"+") else {
        return is_filler(question).then_some(0);
    };
    let end = rest.iter().position(|byte| *byte == b' ')?;
    let (size, filler) = rest.split_at_checked(end)?;
    is_filler(filler.get(1..)?).then(|| str::from_utf8(size).ok()?.parse().ok()).flatten()
}

/// Fills up to `size` bytes, the last of which ends the line.
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

    fn answered(question: &[u8]) -> Vec<u8> {
        answer("a1", CLIENT.parse().unwrap(), question)
    }

    #[test]
    fn questions_and_answers_have_the_size_asked_for() {
        for size in [10, 1400, 1_000_000] {
            let question = question(size, 2 * size);
            assert_eq!(question.len(), size);
            assert_eq!(answered(&question).len(), (2 * size).max("a1 192.0.2.1:40000 \n".len()));
        }
        assert_eq!(question(1, 0), b"\n");
    }

    #[test]
    fn an_answer_tells_who_answered_and_whom() {
        let (host, client) = read_answer(&answered(&question(5, 0))).unwrap();
        assert_eq!((&*host, client), ("a1", CLIENT.parse().unwrap()));
    }

    #[test]
    fn damage_on_the_way_shows_in_either_direction() {
        let whole = question(3000, 3000);
        for damage in
            [|bytes: &mut Vec<u8>| drop(bytes.drain(1000..2448)), |bytes: &mut Vec<u8>| bytes[1500] ^= 1]
        {
            let mut question = whole.clone();
            damage(&mut question);
            assert_eq!(read_answer(&answered(&question)), None);
            let mut answer = answered(&whole);
            damage(&mut answer);
            assert_eq!(read_answer(&answer), None);
        }
    }
}
