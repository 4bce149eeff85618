//! Finds pods that are no endpoints, of which the daemon knows nothing.

use std::{fmt, sync::Arc};

use futures::future::BoxFuture;

use crate::model::{NamespacedName, PodPlace};

type Find = dyn Fn(NamespacedName) -> BoxFuture<'static, Result<PodPlace, String>> + Send + Sync;

/// Asks the API server for a pod. The error says what to do instead.
#[derive(Clone)]
pub struct PodFinder(Arc<Find>);

impl PodFinder {
    /// Creates a finder.
    pub fn new<F>(find: impl Fn(NamespacedName) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<PodPlace, String>> + Send + 'static,
    {
        Self(Arc::new(move |name| Box::pin(find(name))))
    }

    pub(crate) async fn find(&self, name: NamespacedName) -> Result<PodPlace, String> {
        (self.0)(name).await
    }
}

impl fmt::Debug for PodFinder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PodFinder")
    }
}
