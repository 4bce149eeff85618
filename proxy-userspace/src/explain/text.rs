//! Writes an explanation for people.

use std::fmt;

use super::{
    AffinityState, Check, EndpointChoice, Explanation, Hook, Location, Masquerade, Policy, ServiceOf, Source,
    SourceRanges, Verdict,
};

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines().iter().try_for_each(|(name, text)| writeln!(f, "{name:<14} {text}"))
    }
}

impl Explanation {
    /// Returns the steps of the decision, in order. Further endpoints have no name.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = vec![
            ("Client", self.client_text()),
            ("Destination", format!("{} {}", self.destination, self.protocol)),
            ("Hook", format!("{}: {}", hook(self.hook), self.hook_reason)),
        ];
        lines.extend(self.service.as_ref().map(|service| ("Service", service.text())));
        lines.extend(self.source_ranges.as_ref().map(|ranges| ("Source ranges", ranges.text())));
        let policy = |policy: &Policy| format!("{} {}: {}", policy.field, policy.value, policy.effect);
        lines.extend(self.policy.as_ref().map(|applied| ("Policy", policy(applied))));
        let affinity = |seconds| format!("ClientIP, {seconds} s: {}", self.affinity_text());
        lines.extend(self.affinity_seconds.map(|seconds| ("Affinity", affinity(seconds))));
        lines.extend(self.masquerade.as_ref().map(|masquerade| ("Masquerade", masquerade.text())));
        let names = std::iter::once("Endpoints").chain(std::iter::repeat(""));
        lines.extend(names.zip(self.endpoints.iter().map(EndpointChoice::text)));
        lines.push(("Verdict", format!("{}: {}", self.verdict_text(), self.reason)));
        let names = std::iter::once("Others").chain(std::iter::repeat(""));
        lines.extend(names.zip(self.others.iter().flat_map(|others| or_none(others))));
        let names = std::iter::once("Check").chain(std::iter::repeat(""));
        lines.extend(names.zip(self.check.iter().flat_map(Check::lines)));
        lines
    }

    fn affinity_text(&self) -> String {
        match &self.affinity {
            None => "the client keeps its endpoint".to_owned(),
            Some(AffinityState::Holds { endpoint, remaining_seconds: Some(seconds) }) => {
                format!("the client holds {endpoint}, for {seconds} s if it does not connect again")
            }
            Some(AffinityState::Holds { endpoint, remaining_seconds: None }) => {
                format!("the client holds {endpoint}")
            }
            Some(AffinityState::HoldsNone) => "the client holds no endpoint yet".to_owned(),
            Some(AffinityState::Unknown(why)) => format!("who holds it is not known: {why}"),
        }
    }

    /// Returns the verdict, with what the client sees if that depends on the hook.
    const fn verdict_text(&self) -> &'static str {
        match (self.verdict, self.hook) {
            (Verdict::Translate, _) => "translated",
            (Verdict::Pass, _) => "passes unchanged",
            (Verdict::Refuse, _) => "refused",
            (Verdict::Drop, Hook::Socket) => "dropped (the socket gets EHOSTUNREACH at once)",
            (Verdict::Drop, _) => "dropped (no answer comes)",
        }
    }

    fn client_text(&self) -> String {
        let location = match self.location {
            Location::Node => "this node",
            Location::Pod => "a pod of this node",
            Location::Outside => "outside this node",
        };
        let address = self.client.map(|address| format!("{address}, ")).unwrap_or_default();
        let pod = self.client_pod.as_ref();
        let pod = pod.map(|pod| format!("{}/{}, ", pod.namespace, pod.name)).unwrap_or_default();
        format!("{address}{pod}{location} ({})", self.location_reason)
    }
}

/// Returns the rules of others, or that none was found.
fn or_none(others: &[String]) -> Vec<String> {
    if others.is_empty() {
        vec!["no rule of others was found that may drop or translate it".to_owned()]
    } else {
        others.to_vec()
    }
}

impl Check {
    fn lines(&self) -> Vec<String> {
        let same = self.compared.iter().map(|what| format!("= {what}"));
        same.chain(self.differences.iter().map(|what| format!("! {what}"))).collect()
    }
}

impl ServiceOf {
    fn text(&self) -> String {
        let Self { namespace, name, port_name, kind } = self;
        let port = if port_name.is_empty() { String::new() } else { format!(":{port_name}") };
        format!("{namespace}/{name}{port}, {kind}")
    }
}

impl SourceRanges {
    fn text(&self) -> String {
        let verb = if self.allowed { "hold" } else { "do not hold" };
        let list: Vec<_> = self.ranges.iter().map(ToString::to_string).collect();
        format!("{} {verb} the client", list.join(", "))
    }
}

impl Masquerade {
    fn text(&self) -> String {
        format!("{}: {}", if self.applies { "yes" } else { "no" }, self.reason)
    }
}

impl EndpointChoice {
    fn text(&self) -> String {
        let node = self.node.as_deref().unwrap_or("no node");
        let pod = self.pod.as_ref().map(|pod| format!("{pod}, ")).unwrap_or_default();
        let here = if self.local { ", this node" } else { "" };
        match (&self.reason, self.source) {
            (Some(reason), _) => format!("- {} ({pod}{node}{here}): {reason}", self.address),
            (None, Some(Source::Node)) => {
                format!("+ {} ({pod}{node}{here}) sees an address of this node", self.address)
            }
            (None, _) => format!("+ {} ({pod}{node}{here}) sees the client's address", self.address),
        }
    }
}

const fn hook(hook: Hook) -> &'static str {
    match hook {
        Hook::Socket => "socket programs",
        Hook::Link => "link program",
        Hook::Backstop => "backstop",
        Hook::Netfilter => "rules",
        Hook::Nothing => "none",
    }
}
