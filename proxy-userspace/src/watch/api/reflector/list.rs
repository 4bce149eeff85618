//! Lists that are not streamed.

use tracing::debug;

use super::{End, Reflector, incoming::Incoming};
use crate::watch::{
    api::{
        failure::FailureClass,
        list_reader::ListReader,
        request::{self, Freshness, HttpRequest, PAGE_SIZE},
        response,
        wire::{ListMetadata, Object},
    },
    decode::Kind,
};

impl<K: Kind> Reflector<K> {
    /// Lists with the parameters of client-go's reflector. With a limit and [`Freshness::Any`], a
    /// server that has a cache answers from it, without pages.
    pub(super) async fn list(&mut self) -> Result<(), End> {
        let from_cache = matches!(self.freshness, Freshness::NotOlderThan(_)) && !self.has_pages;
        let limit = (!from_cache).then_some(PAGE_SIZE);
        match self.list_pages(limit).await {
            Err(End::Failed(failure)) if failure.class == FailureClass::Expired && limit.is_some() => {
                debug!(resource = K::PLURAL, "the list expired between two pages: {failure}");
                self.list_pages(None).await
            }
            result => result,
        }
    }

    async fn list_pages(&mut self, limit: Option<u32>) -> Result<(), End> {
        let mut list = Incoming::new(!self.was_listed);
        let mut request = request::list::<K>(&self.options, &self.freshness, limit)?;
        loop {
            let page = self.read_page(request, &mut list).await?;
            let Some(token) = page.continue_token.filter(|token| !token.is_empty()) else {
                return self.replace(list, page.resource_version.map(Into::into)).await;
            };
            self.has_pages |= self.freshness == Freshness::Any;
            request = request::next_page::<K>(&self.options, limit, &token)?;
        }
    }

    /// Requests a page, and adds its items to `list`.
    async fn read_page(&mut self, request: HttpRequest, list: &mut Incoming<K>) -> Result<ListMetadata, End> {
        let limit = self.timing.response;
        let mut response = response::send(&self.client, request, limit).await?;
        let mut reader = ListReader::new(response.encoding());
        let mut decoded = Vec::new();
        loop {
            let mut take = |item: &Object<'_>| decoded.extend(self.decode(item).1);
            let is_over = !response.read(limit, |bytes| reader.read(bytes, &mut take)).await?;
            for delta in decoded.drain(..) {
                self.add(delta, list).await?;
            }
            if is_over {
                return Ok(reader.finish()?);
            }
        }
    }
}
