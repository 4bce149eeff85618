//! The hooks of links: what no socket hook saw is translated as it comes in, and back as it leaves.
#![forbid(unsafe_code)]

use crate::ctx::{Layer, Skb};

/// What becomes of a packet.
#[derive(Clone, Copy)]
pub enum Outcome {
    /// It goes on, to other programs on the link too.
    Proceed,
    /// It ends here.
    Drop,
}

impl Outcome {
    /// What the kernel expects of the program: `TC_ACT_UNSPEC`, which is `TCX_NEXT` too, or `TC_ACT_SHOT`.
    #[inline(always)]
    pub const fn code(self) -> i32 {
        match self {
            Self::Proceed => -1,
            Self::Drop => 2,
        }
    }
}

/// A packet comes in on a link.
#[inline(always)]
pub fn ingress<L: Layer>(skb: &Skb<L>) -> Outcome {
    let _ = skb;
    Outcome::Proceed
}

/// A packet leaves on a link.
#[inline(always)]
pub fn egress<L: Layer>(skb: &Skb<L>) -> Outcome {
    let _ = skb;
    Outcome::Proceed
}
