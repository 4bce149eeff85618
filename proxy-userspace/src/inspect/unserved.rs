//! Says why a Service that somebody names is not served.

use std::{fmt, sync::Arc, time::Duration};

use axum::{
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use futures::future::BoxFuture;
use tokio::{sync::Semaphore, time::timeout};

use super::{ServiceName, server::NodeInspector};
use crate::model::{NamespacedName, UnservedReason};

/// How long a question to the API server may take. Whoever asks waits for the answer.
const PATIENCE: Duration = Duration::from_secs(3);

type Find = dyn Fn(NamespacedName) -> BoxFuture<'static, Option<UnservedReason>> + Send + Sync;

/// Asks the API server about a Service that the watches do not send. `None` if that is not known.
/// One question at a time: whoever may read the pages can ask.
#[derive(Clone)]
pub struct ServiceFinder {
    find: Arc<Find>,
    free: Arc<Semaphore>,
}

impl ServiceFinder {
    /// Creates a finder.
    pub fn new<F>(find: impl Fn(NamespacedName) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Option<UnservedReason>> + Send + 'static,
    {
        Self { find: Arc::new(move |name| Box::pin(find(name))), free: Arc::new(Semaphore::new(1)) }
    }

    async fn find(&self, name: NamespacedName) -> Option<UnservedReason> {
        let _alone = self.free.try_acquire().ok()?;
        timeout(PATIENCE, (self.find)(name)).await.ok().flatten()
    }
}

impl fmt::Debug for ServiceFinder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServiceFinder")
    }
}

impl NodeInspector {
    /// Says why a Service is not served: asks the model, and then the API server. `None` if that is
    /// not known, or if the Service is served.
    pub async fn unserved(&self, name: &NamespacedName) -> Option<String> {
        let of = name.clone();
        let read = self.inspector.read(move |inspected| {
            let is_served = inspected.model.ports_of_service(&of).next().is_some();
            (is_served, inspected.model.unserved(&of))
        });
        let reason = match read.await.ok()? {
            (true, _) => None,
            (false, Some(reason)) => Some(reason),
            (false, None) => self.services.find(name.clone()).await,
        };
        reason.map(|reason| reason.sentence(name))
    }
}

/// Answers with a sentence, or with status 404 if nothing is known.
pub(super) async fn answer(State(node): State<NodeInspector>, Query(name): Query<ServiceName>) -> Response {
    let Ok(name) = NamespacedName::parse(&name.namespace, &name.name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    node.unserved(&name).await.map_or(StatusCode::NOT_FOUND.into_response(), IntoResponse::into_response)
}
