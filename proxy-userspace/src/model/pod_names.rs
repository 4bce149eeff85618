//! The names of the pods of a slice, packed into one text.

use std::{fmt, iter};

use super::Name;

/// The names of the pods behind the endpoints of a slice, in the order of the endpoints. The pods
/// are in the namespace of the slice.
///
/// Most slices have the pods of one `ReplicaSet`, whose names share a long prefix. So they are one
/// text: the prefix that all names share, then the rest of each name behind [`POD`]. An endpoint
/// without a pod has [`NO_POD`]. The text is empty if no endpoint has a pod.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PodNames(Box<str>);

/// Stands before the rest of a name. No [`Name`] contains it.
const POD: char = '/';
/// Stands for an endpoint without a pod. No [`Name`] contains it.
const NO_POD: char = '!';

impl PodNames {
    /// Packs the names of the endpoints' pods. Names are only shown, so one that is not valid is
    /// replaced by none.
    pub fn pack(names: &mut [Option<&str>]) -> Self {
        for name in &mut *names {
            *name = name.filter(|name| Name::is_subdomain(name));
        }
        let Some(first) = names.iter().flatten().next() else { return Self::default() };
        let shared =
            names.iter().flatten().fold(first.len(), |shared, name| shared_length(&first[..shared], name));
        let rests = names.iter().map(|name| name.map(|name| &name[shared..]));
        let lengths = rests.clone().map(|rest| 1 + rest.map_or(0, str::len));
        let mut text = String::with_capacity(shared + lengths.sum::<usize>());
        text.push_str(&first[..shared]);
        for rest in rests {
            text.push(if rest.is_some() { POD } else { NO_POD });
            text.push_str(rest.unwrap_or_default());
        }
        Self(text.into())
    }

    /// Returns true if no endpoint has a pod.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the name of each endpoint's pod. Ends before the first endpoint if there is no pod.
    pub fn iter(&self) -> impl Iterator<Item = Option<Name>> {
        let (prefix, rests) = self.parts();
        rests.map(move |rest| Name::subdomain(&[prefix, rest?].concat()).ok())
    }

    /// Returns the name of the pod of an endpoint.
    pub fn get(&self, endpoint: usize) -> Option<Name> {
        self.iter().nth(endpoint).flatten()
    }

    /// Returns the endpoint whose pod has this name.
    pub fn position(&self, name: &str) -> Option<usize> {
        let equal = shared_length(&self.0, name);
        // Almost all slices end here.
        if !self.0[equal..].starts_with([POD, NO_POD]) {
            return None;
        }
        let (prefix, mut rests) = self.parts();
        let wanted = name.strip_prefix(prefix)?;
        rests.position(|rest| rest == Some(wanted))
    }

    /// Returns the shared prefix, and the rest of each name.
    fn parts(&self) -> (&str, impl Iterator<Item = Option<&str>>) {
        let next_mark = |text: &str| text.find([POD, NO_POD]).unwrap_or(text.len());
        let (prefix, mut marked) = self.0.split_at(next_mark(&self.0));
        let rests = iter::from_fn(move || {
            let mark = marked.chars().next()?;
            let behind = &marked[mark.len_utf8()..];
            let (rest, others) = behind.split_at(next_mark(behind));
            marked = others;
            Some((mark == POD).then_some(rest))
        });
        (prefix, rests)
    }
}

/// Returns the number of bytes at the start that are equal.
fn shared_length(one: &str, other: &str) -> usize {
    let (words, _) = one.as_bytes().as_chunks::<8>();
    let (other_words, _) = other.as_bytes().as_chunks::<8>();
    let equal_words = words.iter().zip(other_words).take_while(|(word, other)| word == other).count();
    let start = equal_words * 8;
    let rest = one.as_bytes()[start..].iter().zip(&other.as_bytes()[start..]);
    start + rest.take_while(|(byte, other)| byte == other).count()
}

impl FromIterator<Option<Name>> for PodNames {
    fn from_iter<I: IntoIterator<Item = Option<Name>>>(names: I) -> Self {
        let names: Vec<_> = names.into_iter().collect();
        Self::pack(&mut names.iter().map(Option::as_deref).collect::<Vec<_>>())
    }
}

impl fmt::Debug for PodNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, option, prelude::*};

    use super::*;

    fn packed(names: &[&'static str]) -> PodNames {
        names.iter().map(|name| (!name.is_empty()).then(|| Name::from(*name))).collect()
    }

    #[test]
    fn a_shared_prefix_is_stored_once() {
        let names = packed(&["web-5d4f8c7b9d-x2k9q", "web-5d4f8c7b9d-abcde", "", "web-5d4f8c7b9d-a"]);
        assert_eq!(&*names.0, "web-5d4f8c7b9d-/x2k9q/abcde!/a");
    }

    #[test]
    fn endpoints_without_pods_take_no_memory() {
        assert_eq!(packed(&["", ""]), PodNames::default());
        assert_eq!(packed(&["", ""]).get(1), None);
    }

    proptest! {
        #[test]
        fn each_endpoint_gets_the_name_that_it_had(
            names in vec(option::of("(web-5d4f|web-5d4f8c7b9d-x|web-)?[a-c]{1,3}(\\.[a-c]{1,2})?"), 0..5),
        ) {
            let names: Vec<_> =
                names.iter().map(|name| name.as_deref().and_then(|name| Name::subdomain(name).ok())).collect();
            let packed: PodNames = names.iter().cloned().collect();
            let read: Vec<_> = (0..names.len()).map(|index| packed.get(index)).collect();
            prop_assert_eq!(&read, &names);
            prop_assert_eq!(packed.get(5), None);
            for name in names.iter().flatten() {
                let first = names.iter().position(|other| other.as_ref() == Some(name));
                prop_assert_eq!(packed.position(name), first);
            }
            prop_assert_eq!(packed.position("of-no-endpoint"), None);
        }
    }
}
