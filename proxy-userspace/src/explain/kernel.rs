//! What the kernel adds to an explanation: who holds affinity, and where it differs from the model.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{Explanation, Hook, Verdict};

/// The affinity of the client, as the kernel has it now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum AffinityState {
    /// The client holds an endpoint.
    Holds {
        /// The endpoint.
        endpoint: SocketAddr,
        /// For how long, if the client does not connect again. `None` if the kernel does not tell
        /// it.
        remaining_seconds: Option<u64>,
    },
    /// The client holds none: its next connection gets one.
    HoldsNone,
    /// The kernel cannot be read.
    Unknown(String),
}

/// What the kernel says to the question (`--check`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What was compared, a sentence for each.
    pub compared: Vec<String>,
    /// Where model and kernel differ. Empty if they do not.
    pub differences: Vec<String>,
}

/// What a program in the kernel did with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The verdict.
    pub verdict: Verdict,
    /// The destination afterwards.
    pub destination: SocketAddr,
}

impl Explanation {
    /// Returns true if the client's socket connects to the endpoint itself.
    pub fn is_at_socket(&self) -> bool {
        self.hook == Hook::Socket
    }

    /// Adds the affinity of the client. A client that holds an endpoint which it may have gets it.
    pub fn set_affinity(&mut self, state: AffinityState) {
        if let (AffinityState::Holds { endpoint, .. }, Verdict::Translate) = (&state, self.verdict)
            && self.may_get(*endpoint)
        {
            self.reason = format!("the endpoint {endpoint}, which holds the client's affinity");
        }
        self.affinity = Some(state);
    }

    /// Compares what a program in the kernel decided. A packet of a client with affinity gets any
    /// endpoint here, because the program does not know the client.
    pub fn compare(&self, decided: Decision, check: &mut Check) {
        let Decision { verdict, destination } = decided;
        let what = match verdict {
            Verdict::Translate => format!("translates it to {destination}"),
            Verdict::Pass => "passes it unchanged".to_owned(),
            Verdict::Refuse => "refuses it".to_owned(),
            Verdict::Drop => "drops it".to_owned(),
        };
        let is_same = verdict == self.verdict && (verdict != Verdict::Translate || self.may_get(destination));
        if is_same {
            check.compared.push(format!(
                "a copy of the link program, with the maps in use and a packet of the client, {what}"
            ));
        } else {
            check.differences.push(format!("the link program {what}"));
        }
    }

    fn may_get(&self, endpoint: SocketAddr) -> bool {
        self.endpoints.iter().any(|choice| choice.chosen && choice.address == endpoint)
    }
}
